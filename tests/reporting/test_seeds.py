"""Several runs of one recipe: what they say together, and which do not belong together."""

import copy
import json

import numpy as np
import pytest
from scipy import stats

from empax.core.config import ConfigError
from empax.core.files import DataError, read_json, write_json
from empax.reporting import seeds

SHA = "0123456789abcdef"
VALUES = {"bleu_1": (20.0, 22.0, 21.5), "rouge_l": (0.1, 0.12, 0.11)}


def value(number):
    return {"value": number, "low": 0.0, "high": 100.0}


@pytest.fixture
def paths(tmp_path):
    for seed in range(3):
        metrics = {name: value(values[seed]) for name, values in VALUES.items()}
        report = {
            "system": "emprl",
            "config": {"seed": seed, "data": {"dir": f"place {seed}"}, "ppo": {"steps": 3}},
            "data": {"source_hash": "5e"},
            "counts": {"rows": 9},
            "rows": {"rows": 9, "dialogues": 3, "resampled": "dialogues", "sha256": SHA},
            "run": {"seed": seed, "commit": "abc"},
            "metrics": {**metrics, "perplexity": value(None if seed == 1 else 9.0)},
            "variants": {"bleu_1:moses": value(10.0 + seed)},
            "evaluations": {
                "dailydialog": {
                    "stage": "ppo", "corpus": "dailydialog", "split": "test",
                    "metrics": {"bleu_2": value(float(seed))}, "variants": {},
                }
            },
        }  # fmt: skip
        write_json(tmp_path / f"run{seed}" / "report.json", report)
    return [tmp_path / f"run{seed}" / "report.json" for seed in range(3)]


def change(path, where, new):
    report = read_json(path)
    *keys, last = where.split(".")
    node = report
    for key in keys:
        node = node[key]
    if new is ...:
        del node[last]
    else:
        node[last] = copy.deepcopy(new)
    write_json(path, report)


def test_mean_deviation_and_t_interval_of_every_metric(paths):
    found = seeds.summarize(paths)
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
    assert [run["name"] for run in found["runs"]] == ["run0", "run1", "run2"]
    for name, values in VALUES.items():
        over = found["metrics"][name]
        assert over["values"] == list(values)
        assert over["mean"] == pytest.approx(np.mean(values))
        assert over["std"] == pytest.approx(np.std(values, ddof=1))
        low, high = stats.t.interval(0.95, df=2, loc=np.mean(values), scale=stats.sem(values))
        assert (over["low"], over["high"]) == pytest.approx((low, high), rel=1e-5)
    assert found["variants"]["bleu_1:moses"]["mean"] == 11.0
    assert found["evaluations"]["dailydialog"]["metrics"]["bleu_2"]["mean"] == 1.0
    assert found["left_out"] == ["perplexity"]  # seed 1 has no number for it
    assert seeds.summarize([path.parent for path in paths]) == found


def test_the_tables_hold_what_the_summary_holds(paths, tmp_path):
    summary = seeds.summarize(paths)
    printed = seeds.text(summary).splitlines()
    assert printed[:5] == [
        "emprl, 3 runs",
        f"Corpus: unknown; 9 rows of 3 dialogues (sha256 {SHA}); 95% intervals over seeds. "
        "Text: lower case, NLTK words (BLEU); lower case, runs of a-z and 0-9 (ROUGE-L).",
        "metric    mean    std    95% interval  seed 0  seed 1  seed 2",
        "bleu_1   21.17   1.04  [18.58, 23.75]   20.00   22.00   21.50",
        "rouge_l  0.110  0.010  [0.085, 0.135]   0.100   0.120   0.110",
    ]
    assert "dailydialog" in printed
    assert printed[-1] == "not in every run, so left out: perplexity"
    assert "moses" not in "".join(printed)
    assert "bleu_1:moses" in seeds.text(summary, variants=True)
    seeds.write(summary, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "seeds.json").read_text()) == summary
    lines = (tmp_path / "out" / "seeds.md").read_text().splitlines()
    assert "| bleu_1 | 21.17 | 1.04 | [18.58, 23.75] | 20.00 | 22.00 | 21.50 |" in lines
    assert "## dailydialog" in lines


def test_the_corpus_is_the_one_that_the_reports_name(paths):
    change(paths[0], "test_set", {"corpus": "EmpatheticDialogues", "split": "test"})
    assert seeds.text(seeds.summarize(paths)).splitlines()[1].startswith("Corpus: EmpatheticDialogues; 9 rows of 3 ")
    change(paths[0], "rows", {})  # as in older reports
    assert seeds.text(seeds.summarize(paths)).splitlines()[1].startswith("Text: lower case")


def test_an_evaluation_that_a_run_lacks_is_left_out(paths):
    change(paths[2], "evaluations", ...)
    found = seeds.summarize(paths)
    assert found["evaluations"] == {}
    assert found["left_out"] == ["perplexity", "dailydialog"]


@pytest.mark.parametrize(
    ("where", "new", "says"),
    [
        ("config.ppo.steps", 4, r"different recipes \(config\.ppo\.steps: 3 there, 4 here\); only seeds"),
        ("system", "reg", r"different systems \('emprl' there, 'reg' here\)"),
        ("rows.sha256", "ff", r"different test rows \(rows\.sha256: '0123456789abcdef' there, 'ff' here\)"),
        ("counts.rows", 8, r"different test rows \(rows: 9 there, 8 here\)"),
        ("data.source_hash", "77", r"different test rows \(data\.source_hash: '5e' there, '77' here\)"),
        ("config.seed", 1, r"run1/report\.json and .*run2/report\.json are from the same run"),
        ("metrics", ..., r"run2/report\.json is not the report of a run: it lacks metrics"),
    ],
)
def test_what_does_not_belong_together_is_refused(paths, where, new, says):
    change(paths[2], where, new)
    with pytest.raises((ConfigError, DataError), match=says):
        seeds.summarize(paths)


def test_other_rows_of_another_corpus_are_refused(paths):
    for path, sha256 in zip(paths, ("5e", "5e", "77"), strict=True):
        change(path, "evaluations.dailydialog.rows", {"sha256": sha256})
    assert seeds.summarize(paths[:2])["evaluations"]
    with pytest.raises(DataError, match=r"different test rows \(dailydialog: rows\.sha256: '5e' there, '77' here\)"):
        seeds.summarize(paths)


def test_the_seed_of_one_stage_makes_another_run(paths):
    change(paths[2], "config.seed", 1)
    change(paths[2], "config.ppo.seed", 7)
    assert len(seeds.summarize(paths)["runs"]) == 3


def test_one_report_or_none_is_an_error(paths):
    for given in ([], paths[:1]):
        with pytest.raises(DataError, match=f"{len(given)} reports given; .* at least two"):
            seeds.summarize(given)
    with pytest.raises(DataError, match=r"there is no file .*gone.json; give the report\.json of finished"):
        seeds.summarize([*paths, paths[0].with_name("gone.json")])


def test_scored_files_are_told_apart_by_their_hash(paths):
    for number, path in enumerate(paths):
        change(path, "config", {})
        change(path, "run", {"predictions_sha256": f"{min(number, 1)}"})
    assert [run["name"] for run in seeds.summarize(paths[:2])["runs"]] == ["run0", "run1"]
    with pytest.raises(DataError, match="are from the same run"):
        seeds.summarize(paths)
