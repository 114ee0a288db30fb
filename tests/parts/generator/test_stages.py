"""Which emotion heads a stage's generator has that learnt anything, and the parameters that it begins with."""

from pathlib import Path

import pytest

from configs import emprl_transformer, reg_transformer
from empax.core.files import WorkDir
from empax.core.system import AnswerOptions, RunContext
from empax.parts.generator import stages
from empax.parts.generator.parts import GeneratorParts
from empax.pipeline.plan import make_plan, plain
from empax.systems.emprl import stages as policies
from empax.systems.reg.stages import _heads
from tests.plans import changed

NONE = {"generator.emotion_weight": 0.0, "exemplars.emotion_weight": 0.0, "joint.emotion_weight": 0.0}


def planned(recipe, form, changes, stage):
    """A stage of the tiny recipe, and the parts of its generator."""
    config = changed(plain(recipe.get_config(f"{form},tiny".strip(","))), changes)
    run = RunContext(WorkDir(Path("nowhere")), make_plan(config), stage)
    return run.named(stage).settings, run, GeneratorParts.of(run, planned=True)


@pytest.mark.parametrize(
    ("taught", "changes"),
    [
        (True, {}),
        (False, NONE),
        (True, {**NONE, "generator.emotion_weight": 0.1}),
        (True, {**NONE, "exemplars.emotion_weight": 0.1}),
        (False, {"joint.warm_up": False, "joint.emotion_weight": 0.0}),  # begins with a new head
        (False, {**NONE, "generator.emotion_weight": 0.1, "exemplars.warm_up": False}),
        (True, {"joint.warm_up": False}),
    ],
)
def test_a_head_counts_that_a_stage_or_one_before_it_has_taught(taught, changes):
    stage, run, _ = planned(reg_transformer, "", changes, "joint")
    assert stages.taught_heads(stage, run) == ("generator",) * taught
    assert _heads(stage, run) == (("generator", "retriever", "both") if taught else ("retriever",))


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_a_generator_that_goes_on_has_the_head_of_the_stage_before(first, second):
    weights = {"generator.emotion_weight": first, "longer.emotion_weight": second}
    stage, run, parts = planned(reg_transformer, "no_retrieval", weights, "longer")
    assert stages._task(parts, stage, run).heads == ("generator",) * bool(first or second)


@pytest.mark.parametrize(("stage", "shown"), [("generator", False), ("joint", True)])
def test_an_answer_shows_attributes_only_to_a_generator_that_was_trained_with_some(stage, shown, monkeypatch):
    _, run, parts = planned(reg_transformer, "", {}, "evaluate")
    assert parts.form().attributes
    assert parts.trained_at(run.at(stage)).form().attributes == shown
    monkeypatch.setattr(GeneratorParts, "of", lambda *_, **__: parts)
    monkeypatch.setattr(GeneratorParts, "stage_params", lambda *_: {})
    monkeypatch.setattr(stages, "answerer_of", lambda parts, *_: parts.form(exemplars=False).attributes)
    first = run.named("generator").settings
    assert stages.answer_generator(first, run, AnswerOptions(stage, "", (80,))) == shown


def test_known_parameters_take_the_place_of_drawn_ones_and_new_ones_stay():
    drawn = {"a": {"x": 1, "y": 2}, "b": 3}
    assert stages.overlaid(drawn, {"a": {"x": 10}}) == {"a": {"x": 10, "y": 2}, "b": 3}
    assert stages.overlaid(drawn, {"a": {"x": 10}, "c": 5}) == {"a": {"x": 10, "y": 2}, "b": 3}


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_a_policy_answers_with_the_head_of_the_stage_that_it_begins_with(weight, monkeypatch):
    stage, run, parts = planned(emprl_transformer, "", {"generator.emotion_weight": weight}, "ppo")
    monkeypatch.setattr(policies, "answerer_of", lambda parts, task, *_: task.heads)
    assert policies._answerer(parts, run, stage, {}, AnswerOptions("ppo", "")) == ("generator",) * bool(weight)
