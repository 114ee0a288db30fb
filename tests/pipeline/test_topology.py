"""Estimates for TPU slices: the arithmetic, and what is refused. Compiling for one needs libtpu (extra `plan`)."""

import dataclasses
import re

import pytest

from configs import emprl_transformer, reg_transformer
from empax.core.config import ConfigError
from empax.core.hlo import Work
from empax.pipeline import run
from empax.pipeline.plan import describe
from empax.pipeline.sketches import sketch_stage, trial_flops, update_flops
from empax.pipeline.topology import CHIPS, Estimate, chip_of, model_flops


@pytest.fixture(scope="module")
def config():
    return run.plain(reg_transformer.get_config("tiny"))


def test_times_are_those_of_the_roofline():
    chip = CHIPS["v5e"]
    found = Estimate(
        chip=chip, chips=4, batch=8, parameters=10,
        parameter_bytes=3 * 2**30, optimizer_bytes=6 * 2**30, frozen_bytes=2**30, temporary_bytes=7 * 2**30,
        model_flops=4 * 197e9, work=Work(394e9, 819e6, ()),
        compute_seconds=2e-3, memory_seconds=1e-3, communication_seconds=3e-3,
    )  # fmt: skip
    assert (found.seconds, found.overlapped_seconds) == (5e-3, 3e-3)
    assert found.utilisation(found.seconds) == pytest.approx(0.2)
    assert found.state_bytes == 10 * 2**30
    assert not found.fits
    assert dataclasses.replace(found, temporary_bytes=6 * 2**30).fits


def test_the_models_flops_are_those_without_recomputation(config):
    stages = {stage.name: stage for stage in run.make_stages(config)}
    plain = update_flops(sketch_stage(config, stages["generator"]))
    found = []
    for remat in ("minimal", "full"):
        again = {**config, "reg": {**config["reg"], "generator": {**config["reg"]["generator"], "remat": remat}}}
        stage = next(stage for stage in run.make_stages(again) if stage.name == "generator")
        found.append(update_flops(sketch_stage(again, stage)))
        assert model_flops(again, stage) == plain
    assert plain < found[0] < found[1]


def trials(config, name, **changes):
    config = {**config, name: {**config[name], **changes}}
    stage = next(stage for stage in run.make_stages(config) if stage.name == name)
    return trial_flops(sketch_stage(config, stage))


@pytest.mark.slow  # half a minute of tracing
def test_what_is_tried_out_before_an_update_is_counted(config):
    """By the likelihood, all that is tried is one pass over each candidate."""
    likelihood = {"candidates": 2, "passage_encoder": "frozen", "distillation": {"signal": "likelihood"}}
    twice = {**config, "reg": {**config["reg"], "passages": 4}}
    once = trials(config, "retriever", **likelihood)
    assert trials(twice, "retriever", **{**likelihood, "candidates": 4}) == 2 * once > 0
    # A longer answer takes more steps, and each step looks at more of them.
    short, long = (trials(config, "joint", distillation={"explore_tokens": tokens}) for tokens in (8, 16))
    assert short < long < 4 * short
    assert trials(config, "generator") == 0
    lines = {line.split()[0]: line for line in describe(config).splitlines()}
    assert re.search(r"GFLOPs an update and at most \d+\.\d of answers tried out before it$", lines["joint"])
    assert lines["generator"].endswith("GFLOPs an update")


def test_a_rollout_is_counted_as_well():
    config = run.plain(emprl_transformer.get_config("tiny"))
    decoding = config["ppo"]["rollout"]
    short, long = (trials(config, "ppo", rollout={**decoding, "max_tokens": tokens}) for tokens in (8, 16))
    assert 0 < short < long


@pytest.mark.parametrize("topology", ["v4:2x2", "v5e", "v5e:", "v5e:2xtwo"])
def test_an_unknown_topology_is_named(topology, config):
    with pytest.raises(ConfigError, match=r"is unknown; it is v5e or v5p or v6e, a colon and the sizes"):
        chip_of(topology)
    with pytest.raises(ConfigError, match="is unknown"):
        describe({**config, "plan": {"topology": topology}})


def test_a_plan_of_some_stages_names_those_that_there_are(config):
    config = {**config, "plan": {"topology": "v5e:2x2", "stages": ("joint", "evaluate")}}
    with pytest.raises(ConfigError, match=r"plan\.stages has evaluate; the recipe trains attributes, generator"):
        describe(config)
