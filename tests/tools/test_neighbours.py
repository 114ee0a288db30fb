"""How much a corpus counts is chosen by the very likelihoods that a run reports."""

import dataclasses
from pathlib import Path

import pytest

from empax.core.files import WorkDir, read_json
from empax.core.system import RunContext
from empax.data.batches import draw
from empax.data.store import load_instances
from empax.parts.generator.answerer import Answerer
from empax.parts.generator.settings import NeighbourSettings
from empax.pipeline import evaluate
from empax.pipeline.plan import read_plan
from tools import neighbours


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copy", "knn"])
def test_the_table_has_what_a_run_with_that_weight_would_report(finished, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(neighbours, "TEMPERATURES", (0.1, 1.0))
    with monkeypatch.context() as moved:
        moved.setenv("HOME", str(tmp_path))
        neighbours.main(finished, kind, 6, Path("~/table.json"))
    found = read_json(tmp_path / "table.json")
    assert (found["kind"], found["rows"]) == (kind, 6)
    assert "best: weight " in capsys.readouterr().out
    files = WorkDir(finished)
    plan, on = read_plan(files), NeighbourSettings(**{f"{kind}_weight": 0.5})
    plan = dataclasses.replace(plan, system_settings=dataclasses.replace(plan.system_settings, neighbours=on))
    run = RunContext(files, plan, "evaluate")
    near = 4e-3 if kind == "copy" else 3e-2  # 2% of what 0.2 changes: states of 16 bits are padded otherwise here
    made = evaluate.load_answerer(run.settings("evaluate", evaluate.Settings), run, ())
    asked = draw(load_instances(run, "validation"), 6)
    for weight in (0.0, 0.2):
        own = NeighbourSettings(**{f"{kind}_weight": weight})
        task = dataclasses.replace(made.task, neighbours=own)
        answerer = Answerer(task, made._params, made._make_examples, made.tokenizer, made.buckets)
        if kind == "knn":
            answerer.remember(load_instances(run, "train"))
        answers = answerer.respond(asked, batch_size=6, seed=0)
        expected = sum(one.notes["nll"] for one in answers) / sum(one.notes["num_tokens"] for one in answers)
        assert found["nats_a_token"]["0.1"][str(weight)] == pytest.approx(expected, abs=near)
    assert found["nats_a_token"]["1.0"]["0.0"] == found["nats_a_token"]["0.1"]["0.0"]
