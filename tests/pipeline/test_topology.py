"""Estimates for TPU slices: the arithmetic, and what is refused. Compiling for one needs libtpu (extra `plan`)."""

import dataclasses

import pytest

from configs import reg_transformer
from empax.core.config import ConfigError
from empax.core.hlo import Work
from empax.pipeline import run
from empax.pipeline.plan import describe
from empax.pipeline.sketches import sketch_stage, update_flops
from empax.pipeline.topology import CHIPS, Estimate, chip_of, model_flops


@pytest.fixture(scope="module")
def config():
    return run.plain(reg_transformer.get_config("tiny"))


def test_times_are_those_of_the_roofline():
    chip = CHIPS["v5e"]
    found = Estimate(
        chip=chip, chips=4, batch=8, parameters=10, state_bytes=10 * 2**30, temporary_bytes=7 * 2**30,
        model_flops=4 * 197e9, work=Work(394e9, 819e6, ()),
        compute_seconds=2e-3, memory_seconds=1e-3, communication_seconds=3e-3,
    )  # fmt: skip
    assert (found.seconds, found.overlapped_seconds) == (5e-3, 3e-3)
    assert found.utilisation(found.seconds) == pytest.approx(0.2)
    assert not found.fits
    assert dataclasses.replace(found, temporary_bytes=6 * 2**30).fits


def test_the_models_flops_are_those_without_recomputation(config):
    stages = {stage.name: stage for stage in run.make_stages(config)}
    plain = update_flops(sketch_stage(config, stages["generator"]))
    again = {**config, "reg": {**config["reg"], "generator": {**config["reg"]["generator"], "remat": True}}}
    stage = next(stage for stage in run.make_stages(again) if stage.name == "generator")
    assert update_flops(sketch_stage(again, stage)) > plain
    assert model_flops(again, stage) == plain


@pytest.mark.parametrize("topology", ["v4:2x2", "v5e", "v5e:", "v5e:2xtwo"])
def test_an_unknown_topology_is_named(topology, config):
    with pytest.raises(ConfigError, match=r"is unknown; it is v5e or v5p or v6e, a colon and the sizes"):
        chip_of(topology)
    with pytest.raises(ConfigError, match="is unknown"):
        describe({**config, "plan": {"topology": topology}})
