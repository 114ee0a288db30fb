"""Tables of documents come from results/, and nothing else."""

import math
import re
from pathlib import Path

import pytest

from configs import classic, reflectdiffu
from empax.core.files import DataError, read_json, read_jsonl, write_json, write_text
from tests.reporting.test_report import swapped
from tools.document import figures, fill, main

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("benchmarks.md", "metrics.md")),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_hold_what_the_results_say(path):
    text = path.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert fill(text, RESULTS) == text, f"run python -m tools.document {path.relative_to(ROOT)}"
    for name, chart in figures(text, RESULTS).items():
        assert path.with_name(name).read_text(encoding="utf-8") == chart


def test_every_table_is_in_a_document():
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name in read_json(RESULTS / "tables.json"):
        assert f"<!-- table: {name} -->" in text, name


def test_published_files_name_no_folder_of_the_machine_that_made_them():
    """Their commands have DATA and runs/NAME in place of its folders."""
    texts = [*RESULTS.rglob("*.json"), *(ROOT / "weights").rglob("*.json"), *(ROOT / "weights").rglob("*.md")]
    folder = re.compile(r"(?<![\w.)/])/(?!usr/share/)\w+/")
    for path in texts:
        found = folder.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: {found}"


def words_of(name):
    """A text without its line breaks."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def outputs(run, seed=0):
    return list(read_jsonl(RESULTS / "runs" / run / str(seed) / "outputs.jsonl.gz"))


def test_metrics_tells_what_decoders_and_limits_of_training_do():
    text = words_of("docs/metrics.md")

    def bleu(run):
        return read_json(RESULTS / "runs" / run / "0" / "scores.json")["metrics"]["bleu_2"]["value"]

    consensus, greedy = bleu("reg/t5-no_retrieval"), bleu("reg/t5-sft")
    assert f"has a BLEU-2 of {consensus:.2f}; greedily, the same weights have {greedy:.2f}" in text
    assert f"NEC has {bleu('nec/scratch-no_rerank'):.2f}" in text
    runs = ("classic/kemp", "reg/transformer-no_retrieval-longer", "lempex/full", "published/t5-small")
    found = [outputs(run) for run in runs]
    nll, tokens = ([{row["id"]: row[key] for row in rows} for rows in found] for key in ("nll", "num_tokens"))
    short = [name for name in tokens[0] if max(one[name] for one in tokens) <= 32]
    words = sum(tokens[0][name] for name in short)  # KEMP's tokens are words
    kemp, reg, *_ = (math.exp(sum(one[name] for name in short) / words) for one in nll)
    assert f"the {len(short):,} references that none of these limits cuts" in text
    assert f"the older REG without retrieval ({reg:.1f}, seed 0) is ahead of the older KEMP ({kemp:.1f})" in text


def test_documents_name_the_published_runs_with_label_smoothing_or_dropout():
    runs = RESULTS / "runs"
    reports = [path for system in ("classic", "reflectdiffu") for path in (runs / system).rglob("report.json")]
    found = {path.relative_to(runs).parts[:2]: read_json(path)["config"] for path in reports}
    smoothed = {run for run, config in found.items() if config["generator"].get("label_smoothing")}
    older = {run for run in found if run[0] == "classic" and not run[1].endswith(("-fixed", "-consensus"))}
    assert smoothed == older - {("classic", "cem"), ("classic", "case")}
    assert "(older runs of the classic family, except CEM and CASE;" in words_of("docs/metrics.md")
    assert "in EmpDG's older row, label smoothing raises perplexity" in words_of("README.md")
    dropped = {run for run, config in found.items() if config[config["system"]].get("dropout")}
    assert dropped == {("classic", "empdg"), ("classic", "empdg_critics")}
    assert "EmpDG, with critics and without, had a dropout of 0.2" in words_of("docs/results/classic.md")


def test_emprl_tells_what_the_reward_for_pairs_did_to_the_ends_of_replies():
    shares = []
    for run in ("transformer-expected_before", "transformer-expected"):
        ends = [row["response"].rstrip()[-1:] for seed in range(3) for row in outputs(f"emprl/{run}", seed)[1000:]]
        shares.append(100 * sum(end not in (".", "?", "!") for end in ends) / len(ends))
    assert "at the end rise from {:.0f} to {:.0f} percent".format(*shares) in words_of("docs/results/emprl.md")


def test_documents_tell_todays_budget_and_rate_of_reflectdiffu():
    own, classics = (recipe.get_config().generator for recipe in (reflectdiffu, classic))
    assert own.optimizer.warmup_steps == own.steps // 8
    before = read_json(RESULTS / "runs" / "reflectdiffu" / "full" / "0" / "report.json")["config"]["generator"]["steps"]
    then = f"The default budget was {before:,} updates (today {own.steps:,})"
    assert then in words_of("docs/results/reflectdiffu.md")
    assert f"{before:,} updates instead of {own.steps:,}" in words_of("docs/recipes.md")
    assert own.optimizer == classics.optimizer  # as PAPERS.md says


def test_trials_are_quoted_as_they_ended():
    def losses(name, step):
        return {run: one["validation"][step] for run, one in read_json(RESULTS / "trials" / name)["runs"].items()}

    none, ten, slopes, both = (f"{one['nll']:.3f}" for one in losses("relative_positions.json", "700").values())
    quoted = f"is {none} nats a token with a random initial bias, {slopes} with ALiBi's slopes, {ten} with this group"
    assert f"{quoted} and {both} with both" in words_of("configs/common.py")
    kept, third = (losses("rates.json", "longer")[run] for run in ("kept", "to_a_third"))
    told = words_of("configs/reg_transformer.py")
    assert f"is {third['nll']:.3f} nats a token and emotions are right for {third['emotion_accuracy']:.1%}." in told
    assert f"from there: {kept['nll']:.3f} and {kept['emotion_accuracy']:.1%} (one seed each" in told
    papers = words_of("PAPERS.md")
    plain, alternating = (f"{one['nll']:.3f}" for one in losses("final_norm.json", "700").values())
    assert f"at update 700 is {plain} nats without and {alternating} with it" in papers
    zeros, frequencies, plain, faster = (f"{one['nll']:.3f}" for one in losses("multi_trs.json", "800").values())
    recipe = words_of("configs/classic.py").replace("# ", "")
    assert f"is {faster} nats a word after 800 updates, {plain} with 1e-3" in recipe
    slow, fast = (100 * one["emotion_accuracy"] for one in [*losses("multi_trs.json", "800").values()][-2:])
    assert f"emotions are right for {fast:.1f}% and {slow:.1f}%" in recipe
    assert f"one seed, is {plain} nats a word, {frequencies} with both" in papers
    assert f"one seed, is {frequencies} nats a word with them and {zeros} without" in papers
    by = losses("word_vectors.json", "800")
    nlls = [f"{by[run]['nll']:.2f}" for run in ("minilm", "random", "spacy")]
    assert "{} nats a word with MiniLM's, {} with random ones and {} with spaCy's".format(*nlls) in papers
    shares = [f"{100 * by[run]['emotion_accuracy']:.1f}" for run in ("minilm", "random", "spacy")]
    assert "right for {}, {} and {}%".format(*shares) in papers
    told = words_of("docs/results/reg.md")
    stages = read_json(RESULTS / "trials" / "joint_stage.json")["runs"]
    rows, before = stages["before the joint stage"]["test"].values()
    apart, after = (f"{stages[name]['test']['nll']:.3f}" for name in ("apart", "after it"))
    assert f"On {rows} test rows, the parameters before it give the references {before:.3f} nats a token" in told
    assert f"as those of `:apart` do ({apart}); after it they are {after}" in told
    assert {run["test"]["rows"] for run in stages.values()} == {rows}
    (found,) = (run["utility"] for run in read_json(RESULTS / "trials" / "distillation.json")["runs"].values())
    gain = found["utility_gain_minus_before"]
    assert f"on {found['contexts']} contexts, by {gain['value']:.4f} ({gain['low']:.4f} to {gain['high']:.4f})" in told
    assert f"would gain {found['utility_gain_at_most']['value']:.4f} over their mean" in told


def make_results(folder, value):
    run = folder / "runs" / "reg" / "small" / "0"
    interval = {"value": value, "low": 1.0, "high": 3.0}
    rows = {"rows": 4, "dialogues": 2, "resampled": "dialogues", "sha256": "0" * 16}
    scores = {
        "corpus": "a corpus", "rows": rows, "first_row": 3, "metrics": {"bleu_2": interval}, "variants": {},
        "controls": {"controls": {"canned": {"metrics": {"bleu_2": 0.5}}}}, "empathy": {"linear": {"kappa": value / 8}},
        "verdict": {"degenerate": False, "line": "No degeneracy found in 5 checks."},
    }  # fmt: skip
    write_json(run / "scores.json", scores)
    command = "python -m empax.main --config=configs/reg.py:small --workdir=runs/small"
    write_json(run / "report.json", {"run": {"command": command}})
    rows = [{"name": "small", "run": "reg/small/0"}, {"name": "canned", "run": "reg/small/0", "control": "canned"}]
    table = {"kind": "scores", "metrics": ["bleu_2"], "rows": rows}
    judged = {**table, "metrics": ["bleu_2", "kappa:linear"], "titles": {"kappa:linear": "κ"}}
    write_json(folder / "tables.json", {"small": table, "commands": {**table, "recipes": True}, "judged": judged})
    return folder


def document(*names):
    return "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names)


def test_a_table_is_filled_between_its_marks_and_nothing_else_changes(tmp_path):
    text = "before\n<!-- table: small -->\nold\n<!-- end -->\nafter\n"
    made = fill(text, make_results(tmp_path / "a", 2.0))
    assert made.startswith("before\n<!-- table: small -->\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "| small | 2.00 (1.00–3.00) |\n| canned | 0.50 |" in made
    assert "old" not in made
    assert "a corpus; 4 rows of 2 dialogues" in made
    assert "Test rows 3 to 6." in made
    assert fill(made, tmp_path / "a") == made
    assert fill(made, make_results(tmp_path / "b", 2.5)) != made


def test_a_table_of_pairs_counts_all_tests_that_its_correction_covers(tmp_path):
    cell = {"difference": 1.0, "low": 0.5, "high": 1.5, "p_holm": 0.01}
    pairs = [{"first": a, "second": "c", "rows": 9, "metrics": {"bleu_2": cell, "rouge_l": cell}} for a in "ab"]
    found = {"pairs": pairs, "correction": {"tests": 4, "pairs": 2, "metrics": 2}, "rows": {"resampled": "dialogues"}}
    write_json(tmp_path / "comparisons.json", {"some": found})
    row = {"name": "a − c", "pair": ["a", "c"]}
    table = {"kind": "pairs", "group": "some", "metrics": ["bleu_2"], "rows": [row]}
    write_json(tmp_path / "tables.json", {"pairs": table})
    made = fill(document("pairs"), tmp_path)
    assert "| a − c | **+1.00 (+0.50 to +1.50)** |" in made
    assert "after Holm's correction over 4 tests (2 pairs, 2 metrics)." in made


def test_a_table_may_tell_the_recipe_of_each_run(tmp_path):
    made = fill(document("commands"), make_results(tmp_path, 2.0))
    assert "|  | BLEU-2 ↑ | recipe |" in made
    assert "| small | 2.00 (1.00–3.00) | `reg.py:small` |\n| canned | 0.50 |  |" in made


@pytest.mark.parametrize(("override", "mark"), [
    ("generator.steps=9", " …"), ("data.dir=DATA --config.seed=1 --config.knowledge.entity.path=W", ""),
])  # fmt: skip
def test_a_recipe_with_further_settings_is_marked(tmp_path, override, mark):
    results = make_results(tmp_path, 2.0)
    command = f"python -m empax.main --config=configs/reg.py:small --config.{override}"
    write_json(results / "runs/reg/small/0/report.json", {"run": {"command": command}})
    made = fill(document("commands"), results)
    assert f"| `reg.py:small`{mark} |" in made
    assert ("…: with further settings, see `run.command`" in made) == bool(mark)


def test_broken_replies_are_marked_and_told(tmp_path):
    results = make_results(tmp_path, 2.0)
    path = results / "runs/reg/small/0/scores.json"
    verdict = {"degenerate": True, "line": "Degenerate: 3 of 4 replies are empty; replies are short."}
    write_json(path, {**read_json(path), "verdict": verdict})
    made = fill(document("small"), results)
    assert "| small ‡ | 2.00 (1.00–3.00) |\n| canned | 0.50 |" in made
    assert made.count("‡ Degenerate by the verdict: small: 3 of 4 replies are empty; replies are short.\n") == 1
    over = {"mean": 2.0, "std": 0.5}
    seeds = {**read_json(path), "seeds": ["0"], "metrics": {"bleu_2": over}}
    write_json(results / "runs/reg/small/seeds.json", seeds)
    rows = [{"name": "small", "seeds": "reg/small"}]
    write_json(results / "tables.json", {"small": {**read_json(results / "tables.json")["small"], "rows": rows}})
    made = fill(document("small"), results)
    assert "| small ‡ | 2.00 ± 0.50 |" in made
    assert "‡ Degenerate by the verdict: small (seed 0): 3 of 4" in made


def test_a_table_may_tell_the_kappa_of_a_judge(tmp_path):
    made = fill(document("judged"), make_results(tmp_path, 2.0))
    assert "|  | BLEU-2 ↑ | κ |" in made
    assert "| small | 2.00 (1.00–3.00) | 0.250 |\n| canned | 0.50 |  |" in made


def test_a_table_of_another_corpus_tells_it_and_the_text_normalisation(tmp_path):
    results = make_results(tmp_path, 2.0)
    found = {"corpus": "dailydialog", "split": "test", "metrics": {"bleu_2": {"mean": 2.0, "std": 0.5}}, "variants": {}}
    rows = {"sha256": "0" * 16}
    write_json(results / "runs/reg/small/seeds.json", {"seeds": ["0"], "rows": rows, "evaluations": {"talk": found}})
    row = {"name": "small", "seeds": "reg/small", "evaluation": "talk"}
    write_json(results / "tables.json", {"talk": {"kind": "scores", "metrics": ["bleu_2"], "rows": [row]}})
    made = fill(document("talk"), results)
    assert "| small | 2.00 ± 0.50 |" in made
    assert "Corpus: dailydialog, test split. Text: lower case, NLTK words (BLEU). ±: standard deviation" in made


def test_a_table_that_there_is_not_is_named(tmp_path):
    with pytest.raises(DataError, match="no table 'large'; it has commands, judged, small"):
        fill(document("large"), make_results(tmp_path, 2.0))


def test_a_benchmark_is_told_without_powers_of_ten(tmp_path):
    one = {"ours": 999.6, "theirs": 99.4, "unit": "queries/s", "ratio": 9.0, "lowest_ratio": 9.0, "highest_ratio": 9.0}
    write_json(tmp_path / "benchmarks/m/search.json", {"command": "a command", "rows": {"exact": one}})
    table = {"kind": "benchmark", "machine": "m", "other": "FAISS", "rows": [["search", "exact", "exact search"]]}
    write_json(tmp_path / "tables.json", {"speed": table})
    assert "| exact search | 1,000 queries/s | 99.4 queries/s |" in fill(document("speed"), tmp_path)


def test_a_table_over_other_test_rows_is_refused_until_it_is_two(tmp_path):
    results = make_results(tmp_path, 2.0)
    scores = read_json(results / "runs/reg/small/0/scores.json")
    scores["rows"].update(rows=3, sha256="1" * 16)
    write_json(results / "runs/reg/other/0/scores.json", scores)
    small, row = read_json(results / "tables.json")["small"], {"name": "other", "run": "reg/other/0"}
    write_json(results / "tables.json", {"both": {**small, "rows": [*small["rows"], row]}})
    with pytest.raises(DataError, match=r"'small' answered 4 test rows and 'other' 3 others"):
        fill(document("both"), results)
    write_json(results / "tables.json", {"small": small, "other": {**small, "rows": [row]}})
    assert "3 rows" in fill(document("small", "other"), results)


def test_tables_of_swapped_exemplars_are_those_of_the_report(tmp_path):
    results = make_results(tmp_path, 2.0)
    table = {"kind": "swaps", "run": "reg/small/0"}
    write_json(results / "tables.json", {part: {**table, "part": part} for part in ("likelihoods", "recall")})
    write_json(results / "runs" / "reg" / "small" / "0" / "report.json", {"swaps": swapped()})
    filled = fill(document("likelihoods", "recall"), results)
    assert "| none | 1.000 | +1.000 (+0.500 to +1.500) | – | 1.0000 |" in filled
    assert "| this system's retriever | 1.0 (0.5–1.5) |" in filled
    runs = {"seed 0": "reg/small/0", "seed 1": "reg/small/0"}
    write_json(results / "tables.json", {"seeds": {"kind": "swaps", "runs": runs}})
    filled = fill(document("seeds"), results)
    assert "| given | − none, seed 0 | − none, seed 1 |" in filled
    assert "| its own | +1.000 (+0.500 to +1.500) | +1.000 (+0.500 to +1.500) |" in filled
    assert "| none |" not in filled
    assert "over 20 references. Each column is one model." in filled
    fewer = {"swaps": {name: {**one, "rows": 9} for name, one in swapped().items()}}
    write_json(results / "runs" / "reg" / "small" / "1" / "report.json", fewer)
    runs["seed 1"] = "reg/small/1"
    write_json(results / "tables.json", {"seeds": {"kind": "swaps", "runs": runs}})
    assert "over 20 / 9 references, column by column. Each column" in fill(document("seeds"), results)
    write_json(results / "tables.json", {"one": {**table, "kind": "figure", "file": "one.svg", "alt": "A chart"}})
    file = tmp_path / "a.md"
    write_text(file, document("one"))
    assert main([str(file), f"--results={results}"]) == 0
    assert "![A chart](one.svg)" in file.read_text(encoding="utf-8")
    assert "its own: 1 (0.5 to 1.5)" in file.with_name("one.svg").read_text(encoding="utf-8")
    unanswered = {"swaps": {**swapped()["swaps"], "replies": None}}
    for found, part in (({}, "likelihoods"), (unanswered, "replies")):
        other = make_results(tmp_path / part, 2.0)
        write_json(other / "tables.json", {part: {**table, "part": part}})
        write_json(other / "runs" / "reg" / "small" / "0" / "report.json", {"swaps": found})
        with pytest.raises(DataError, match=f"has no {part} of swapped exemplars; its recipe needs a stage 'swaps'"):
            fill(document(part), other)


def test_the_best_weight_of_a_corpus_is_bold(tmp_path):
    found = {"kind": "knn", "rows": 6, "tokens": 1234, "nats_a_token": {"0.1": {"0.0": 3.5, "0.1": 3.4}}}
    write_json(tmp_path / "neighbours" / "knn.json", found)
    write_json(tmp_path / "tables.json", {"one": {"kind": "weights", "of": "knn"}})
    filled = fill(document("one"), tmp_path)
    assert "| 0.1 | 3.5000 | **3.4000** |" in filled
    assert "over 1,234 tokens of 6 validation replies" in filled


def test_the_command_fills_files_and_names_what_is_missing(tmp_path, capsys):
    results, file = make_results(tmp_path / "results", 2.0), tmp_path / "a.md"
    write_text(file, document("small"))
    assert main([str(file), f"--results={results}"]) == 0
    assert "2.00 (1.00–3.00)" in file.read_text(encoding="utf-8")
    write_text(file, document("large"))
    assert main([str(file), f"--results={results}"]) == 2
    assert "large" in capsys.readouterr().err
