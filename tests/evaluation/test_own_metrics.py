"""Metrics of users, by "module:name": in scores, comparisons, reports and on the command line."""

import dataclasses
import sys
import types

import pytest

import empax
from empax.core.config import ConfigError
from empax.core.types import Prediction
from empax.evaluation.comparing import compare_systems
from empax.evaluation.scoring import METRICS, ScoringSettings, score
from empax.reporting import report
from empax.reporting.tables import describe, metric_title

NAME = "metrics_of_somebody:questions"
ROWS = [
    Prediction((f"turn {i}",), "Why?" if i % 4 else "Oh no.", "What happened?", id=f"d{i // 2}#{i}", emotion="sad")
    for i in range(16)
]
OTHERS = [dataclasses.replace(row, response="Oh no.") for row in ROWS]
FAST = ScoringSettings(bootstrap_samples=20, variants=())


def questions(contexts, responses, references):
    return [float("?" in response) for response in responses]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = types.ModuleType("metrics_of_somebody")
    made.questions = questions
    made.sad = lambda contexts, responses, references, *, emotion: [one == "sad" for one in emotion]
    made.needs = lambda contexts, responses, references, *, topic: [1.0] * len(topic)
    made.short = lambda contexts, responses, references: [1.0]
    made.repeated = lambda contexts, responses, references: [responses.count(one) > 1 for one in responses]
    made.turns = lambda contexts, responses, references: [len(turns) for turns in contexts]
    monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.fixture
def settings():
    return dataclasses.replace(FAST, own=(NAME,))


def test_its_mean_stands_behind_the_other_metrics_with_an_interval(settings):
    found = score(ROWS, settings=settings)
    assert list(found.metrics)[-1] == NAME
    assert set(found.metrics) - {NAME} <= set(METRICS)
    value = found.metrics[NAME]
    assert value["value"] == pytest.approx(0.75)
    assert value["low"] <= 0.75 <= value["high"]
    assert NAME not in score(ROWS, settings=FAST).metrics
    assert empax.score(ROWS, own=[NAME], settings=FAST).metrics[NAME] == value


def test_it_may_read_contexts_and_fields():
    both = dataclasses.replace(FAST, own=("metrics_of_somebody:turns", "metrics_of_somebody:sad"))
    rows = [dataclasses.replace(ROWS[0], context=("a", "b", "c")), dataclasses.replace(ROWS[1], emotion="proud")]
    found = score(rows, settings=both).metrics
    assert (found["metrics_of_somebody:turns"]["value"], found["metrics_of_somebody:sad"]["value"]) == (2.0, 0.5)


def test_systems_are_compared_by_it(settings):
    found = compare_systems({"a": ROWS, "b": OTHERS}, settings=settings, names=("bleu_1", NAME))
    assert found["systems"]["b"]["metrics"][NAME]["value"] == 0.0
    tested = found["pairs"][0]["metrics"][NAME]
    assert tested["difference"] == pytest.approx(0.75)
    assert tested["p_value"] < 0.05
    assert empax.compare({"a": ROWS, "b": OTHERS}, metrics=(NAME,))["pairs"][0]["metrics"][NAME]["p_value"] < 0.05


def test_in_a_comparison_it_sees_the_rows_of_one_system_at_a_time():
    name, needs = "metrics_of_somebody:repeated", "metrics_of_somebody:needs"
    different = [dataclasses.replace(row, response=f"{i}") for i, row in enumerate(ROWS)]
    topics = [dataclasses.replace(row, notes={"topic": "sport"}) for row in different]
    found = compare_systems({"a": different, "b": topics}, settings=FAST, names=("bleu_1", needs, name))
    assert [one["metrics"][name]["value"] for one in found["systems"].values()] == [0.0, 0.0]
    assert needs not in found["systems"]["a"]["metrics"]  # its rows have no topic
    assert found["systems"]["b"]["metrics"][needs]["value"] == 1.0
    assert list(found["pairs"][0]["metrics"]) == ["bleu_1", name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("questions", "metric = 'questions' is not 'module:name'"),
        ("no_such_module:f", "metric = 'no_such_module:f': there is no module 'no_such_module'; put its folder on"),
        ("metrics_of_somebody:short", "the metric metrics_of_somebody:short returned numbers of shape"),
        ("metrics_of_somebody:needs", "asks for topic; the fields of its rows are emotion, id"),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_named(name, message):
    with pytest.raises(ConfigError, match=message):
        empax.score(ROWS, own=[name])


def test_tables_call_it_by_its_function_and_promise_no_direction():
    assert metric_title(NAME) == "questions"
    assert "the text as it is written (Top-5, questions)" in describe(score(ROWS).rows, ["top5_share", NAME])


def test_pages_show_it(tmp_path, settings):
    scores = score(ROWS, settings=settings)
    made = report.build_report(report.Recorded("mine", {}, {}), ROWS, scores, history=(), paper={}, peers={}, notes={})
    report.write_report(made, tmp_path)
    for page in ("report.md", "report.html"):
        assert "questions" in (tmp_path / page).read_text(encoding="utf-8")


def test_the_stage_tries_it_on_two_rows_before_any_work(monkeypatch):
    monkeypatch.setattr(report, "main_stage", lambda plan: "evaluate")
    run = types.SimpleNamespace(plan=None, before=lambda: ("evaluate",), stage="report")
    good = report.Settings(metrics=(NAME, "metrics_of_somebody:needs"))  # a field that only the run's rows may have
    report.check(good, run)  # pyright: ignore[reportArgumentType]
    assert good.scoring().own == good.metrics
    with pytest.raises(ConfigError, match="returned numbers of shape"):
        report.check(report.Settings(metrics=("metrics_of_somebody:short",)), run)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="has no function"):
        report.Settings(metrics=("metrics_of_somebody:nothing",))
