"""Evaluations beside the main one: what is scored of them, and the tables on the pages."""

import pytest

from empax.core.files import DataError, WorkDir, read_json, write_json, write_jsonl
from empax.core.system import RunContext
from empax.core.types import Prediction
from empax.evaluation.published import OTHER_CORPORA
from empax.evaluation.scoring import ScoringSettings, score
from empax.reporting import other_corpora, report
from tests.plans import plan_of

RUN = ["evaluate", "dailydialog_before", "dailydialog", "again", "report"]
SECTIONS = {
    name: {"kind": "evaluate", "stage": "ppo", "corpus": "dailydialog" if "daily" in name else ""} for name in RUN[:-1]
}
EMOTIONS = {"emotion": "sad", "emotion_prediction": "sad"}


def rows(reply, **more):
    return [
        Prediction((f"Hello {i}.",), reply, "I am fine, thank you.", notes={"nll": 9.0, "num_tokens": 4}, **more)
        for i in range(4)
    ]


@pytest.fixture
def files(tmp_path):
    files = WorkDir(tmp_path)
    write_jsonl(files.predictions, rows("Oh", **EMOTIONS))
    drawn = {"instances": 9, "answered": 4, "chosen": "of dialogues drawn at random"}
    write_json(files.stage("evaluate") / "evaluate.json", {"emotion_head": "generator", "data": drawn})
    for stage, model, corpus, reply in (
        ("dailydialog", "ppo", "dailydialog", "I am fine."),
        ("dailydialog_before", "generator", "dailydialog", "I am."),
        ("again", "ppo", "", "Thank you."),
    ):
        write_jsonl(files.evaluation(stage), rows(reply, **({} if corpus else EMOTIONS)))
        data = drawn if corpus else {"instances": 9, "answered": 4}  # as older versions tell of the first rows
        about = {"stage": model, "corpus": corpus, "split": "test", "data": data}
        write_json(files.stage(stage) / "evaluate.json", {**about, "seconds": 1.0})
    return files


def reported(files, **values):
    settings = report.Settings(bootstrap_samples=10, **values)
    report.run(settings, RunContext(files, plan_of({"system": "emprl", "run": RUN, **SECTIONS}), "report"))
    return files.root


@pytest.fixture
def made(files):
    return reported(files, paper_row="EmpRL")


def test_scores_are_of_each_stages_own_rows(files):
    settings = ScoringSettings(bootstrap_samples=10)
    found = other_corpora.score_evaluations(files, {"run": RUN, **SECTIONS}, settings)
    assert list(found) == ["dailydialog_before", "dailydialog", "again"]  # as they ran
    wanted, other = (score(rows(reply), settings=settings).metrics for reply in ("I am fine.", "I am."))
    for name in ("bleu_1", "bleu_2", "rouge_l", "perplexity"):
        assert found["dailydialog"]["metrics"][name] == wanted[name]
        assert found["dailydialog_before"]["metrics"][name] == other[name]
    assert not {"emotion_accuracy", "sentiment_mae"} & set(found["dailydialog"]["metrics"])
    assert {"emotion_accuracy", "sentiment_mae"} <= set(found["again"]["metrics"])
    assert "bleu_2:sacrebleu" in found["dailydialog"]["variants"]
    assert found["dailydialog"]["published"] == OTHER_CORPORA["dailydialog"][1]
    assert found["again"]["published"] == {}
    assert found["dailydialog"]["counts"]["rows"] == 4
    files.evaluation("again").write_text("{}\n")
    with pytest.raises(DataError, match=r"again.predictions\.jsonl, line 1: lacks .*--redo=again"):
        other_corpora.score_evaluations(files, {"run": RUN, **SECTIONS}, settings)


def test_report_json_holds_them_apart_from_the_main_ones(made):
    stored = read_json(made / "report.json")
    assert set(stored["evaluations"]) == {"dailydialog_before", "dailydialog", "again"}
    assert stored["evaluations"]["dailydialog"]["stage"] == "ppo"
    assert set(stored["evaluations"]["dailydialog"]["metrics"]["rouge_l"]) == {"value", "low", "high"}
    assert stored["metrics"]["bleu_1"]["value"] == 0.0  # "Oh"
    assert stored["notes"]["evaluate"]["emotion_head"] == "generator"  # the main one's, not the last one's


def test_each_corpus_has_its_table_with_intervals_and_what_was_published(made):
    lines = (made / "report.md").read_text().splitlines()
    start = lines.index("## DailyDialog, test split")
    table = [line for line in lines[start:] if line.startswith("|")][: 2 + 2 + len(OTHER_CORPORA["dailydialog"][1])]
    assert len({line.count(" | ") for line in table}) == 1
    assert [line.split(" | ")[0] for line in table[2:5]] == [
        "| **dailydialog_before, by generator**", "| **dailydialog, by ppo**", "| **EmpRL**",
    ]  # fmt: skip
    assert "0.092" in table[4]  # printed as 9.21
    assert "(" in table[3]  # intervals
    assert "Emotion" not in table[0]
    drawn = "4 of 9 turns answered, of dialogues drawn at random. No model was trained"
    assert any(line.startswith(drawn) for line in lines)
    assert any(line.startswith("4 of 9 turns answered. ") for line in lines)
    rows = lines[lines.index("## Rows scored") :]  # of the main evaluation
    assert "| chosen | of dialogues drawn at random |" in rows[: rows.index("", 2)]
    assert "## This run's data, test split" in lines
    page = (made / "report.html").read_text()
    assert '<h2>Other test sets</h2></summary><section id="other"><h3>DailyDialog, test split</h3>' in page


def test_without_any_there_is_no_section(files):
    for stage in ("dailydialog", "dailydialog_before", "again"):
        files.evaluation(stage).unlink()
    reported(files)
    assert read_json(files.root / "report.json")["evaluations"] == {}
    assert "Other test sets" not in (files.root / "report.html").read_text()
