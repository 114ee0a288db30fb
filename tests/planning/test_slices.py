"""Estimates for TPU slices: the arithmetic, and what is refused. Compiling for one needs libtpu (extra `plan`)."""

import dataclasses
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import emprl_transformer, reg_transformer
from empax.core.config import ConfigError
from empax.core.system import Sketch, Stage, TaskSpec
from empax.pipeline.plan import make_plan, plain
from empax.planning import slices
from empax.planning.hlo import Collective, Work
from empax.planning.plan import describe
from empax.planning.sketches import count_flops, sketch_stage, step_flops, trial_flops, update_flops
from empax.planning.slices import CHIPS, Estimate, chip_of, model_flops
from tests.plans import changed, plan_of


@pytest.fixture(scope="module")
def config():
    return plain(reg_transformer.get_config("tiny"))


def test_times_are_those_of_the_roofline():
    chip = CHIPS["v5e"]
    found = Estimate(
        chip=chip, chips=4, batch=8, updates=1, parameters=10,
        parameter_bytes=3 * 2**30, optimizer_bytes=6 * 2**30, frozen_bytes=2**30, temporary_bytes=7 * 2**30,
        model_flops=4 * 197e9, work=Work(394e9, 819e6, ()),
        compute_seconds=2e-3, memory_seconds=1e-3, communication_seconds=3e-3,
    )  # fmt: skip
    assert (found.seconds, found.overlapped_seconds) == (5e-3, 3e-3)
    assert found.utilisation(found.seconds) == pytest.approx(0.2)
    assert found.state_bytes == 10 * 2**30
    assert not found.fits
    assert dataclasses.replace(found, temporary_bytes=6 * 2**30).fits


@pytest.mark.multidevice
def test_a_plan_for_a_slice_has_the_work_of_a_chip_at_its_peaks(config, monkeypatch):
    gathered = Collective("all-gather", 2, 8e6, 4e6, 2, 1e8)  # by two chips, on one of the torus's axes
    reduced = Collective("all-reduce", 1, 3e6, 3e6, 4, 2e8)
    work = Work(0.002 * 197e12, 0.001 * 819e9, (gathered, reduced))
    compiled = types.SimpleNamespace(temporary_bytes=2**30, work=lambda: work)
    monkeypatch.setattr(slices, "devices_of", lambda topology: jax.devices()[:4])
    monkeypatch.setattr(slices, "compile_elsewhere", lambda work: compiled)
    said = describe(make_plan({**config, "plan": {"topology": "v5e:2x2", "stages": ("generator",)}}))
    for line in (
        f"{config['generator']['batch_size']} rows a step on 4 chips\n",
        "1.00 temporary with activations; 6% of 16\n",
        "0.394 compiled, 0.82 GB of memory traffic\n",
        "  2 x all-gather among 2: 8.0 MB, the largest 4.0\n  1 x all-reduce among 4: 3.0 MB\n",
        "estimated: compute 2.0 ms, memory 1.0 ms, communication 2.0 ms; a step 4.0 ms (MFU 0%), with overlap 2.0 ms",
    ):
        assert line in said
    assert "tried out" not in said


@pytest.mark.multidevice
def test_batches_that_training_could_not_split_are_refused(config):
    plan = make_plan(changed(config, {"generator.accumulate": 4}))
    with pytest.raises(ConfigError, match=r"config\.generator: batch_size / .* = 2 cannot be split over 4 devices"):
        slices.lay_out(plan, plan.stages["generator"], jax.devices()[:4])


@pytest.mark.slow
def test_the_models_flops_are_those_without_recomputation(config):
    plan = make_plan(config)
    plain = update_flops(sketch_stage(plan, plan.stages["generator"]))
    found = []
    for remat in ("minimal", "full"):
        plan = make_plan(changed(config, {"reg.generator.remat": remat}))
        stage = plan.stages["generator"]
        found.append(update_flops(sketch_stage(plan, stage)))
        assert model_flops(plan, stage) == plain
    assert plain < found[0] < found[1]


def test_nor_does_an_encoder_set_in_the_stage_itself_count_twice(config):
    def with_remat(remat):
        plan = make_plan(changed(config, {"attributes.encoder.remat": remat}))
        return plan, plan.stages["attributes"]

    plain, full = (update_flops(sketch_stage(*with_remat(remat))) for remat in ("none", "full"))
    assert model_flops(*with_remat("full")) == plain < full


def trials(config, name, **changes):
    plan = make_plan(changed(config, {f"{name}.{key}": value for key, value in changes.items()}))
    return trial_flops(sketch_stage(plan, plan.stages[name]))


@pytest.mark.slow  # half a minute of tracing
def test_what_is_tried_out_before_an_update_is_counted(config):
    """By the likelihood, all that is tried is one pass over each candidate."""
    likelihood = {"candidates": 2, "passage_encoder": "frozen", "distillation": {"signal": "likelihood"}}
    once = trials(config, "retriever", **likelihood)
    assert trials(changed(config, {"reg.passages": 4}), "retriever", **{**likelihood, "candidates": 4}) == 2 * once > 0
    # A longer answer takes more steps, and each step looks at more of them.
    short, long = (trials(config, "joint", distillation={"explore_tokens": tokens}) for tokens in (8, 16))
    assert short < long < 4 * short
    assert trials(config, "generator") == 0
    lines = {line.split()[0]: line for line in describe(make_plan(config)).splitlines()}
    assert re.search(r"GFLOPs an update and at most \d+\.\d of answers tried out before it$", lines["joint"])
    assert lines["generator"].endswith("GFLOPs an update")


@pytest.mark.multidevice
def test_of_a_step_of_several_updates_all_are_counted_and_what_the_task_remembers_is_planned(load_module):
    tiny = load_module(Path(__file__).parents[1] / "training" / "tiny.py")

    class Remembering(tiny.Reinforced, tiny.TinyTask):
        def init_memory(self):
            return {"seen": jnp.zeros((), jnp.int32)}

    settings = tiny.settings(steps=1, batch_size=16, epochs=3, minibatches=2, refresh_every_steps=0)
    task, devices = Remembering(), jax.devices()[:4]
    rows = tiny.TinyExamples(24).collate(jnp.arange(16), tiny.LENGTH, None)
    batch, frozen = (jax.eval_shape(lambda tree=tree: tree) for tree in (rows, tiny.frozen()))
    spec = TaskSpec(type(None), lambda *_: None, lambda *_: None, lambda *_: Sketch(task, batch, frozen))
    stage = Stage("tiny", "train", None, spec=spec, loop=settings)
    plan = plan_of({"mesh": {"fsdp": 2}})
    laid = slices.lay_out(plan, stage, devices)
    assert laid.template.memory["seen"].shape == ()
    flops = count_flops(laid.step, laid.template, laid.frozen, laid.batch)
    assert flops == step_flops(sketch_stage(plan, stage), settings)


@pytest.mark.slow  # as long, of tracing
def test_all_updates_that_a_policy_makes_from_a_batch_are_counted():
    config = plain(emprl_transformer.get_config("tiny"))
    assert (config["ppo"]["epochs"], config["ppo"]["minibatches"]) == (2, 2)
    config = changed(config, {"run": ["prepare", "ppo"], "ppo.epochs": 3})
    plan = make_plan(config)
    stage = plan.stages["ppo"]
    one = update_flops(sketch_stage(plan, stage))
    assert model_flops(plan, stage) == 3 * one
    assert f" {3 * one / 1e9:.1f} GFLOPs in 6 updates and at most " in describe(make_plan(config))


@pytest.mark.parametrize("topology", ["v4:2x2", "v5e", "v5e:", "v5e:2xtwo"])
def test_an_unknown_topology_is_named(topology, config):
    with pytest.raises(ConfigError, match=r"is unknown; it must be v5e or v5p or v6e, a colon and the sizes"):
        chip_of(topology)
    with pytest.raises(ConfigError, match="is unknown"):
        describe(make_plan({**config, "plan": {"topology": topology}}))


def test_a_plan_of_some_stages_names_those_that_there_are(config):
    config = {**config, "plan": {"topology": "v5e:2x2", "stages": ("joint", "evaluate")}}
    with pytest.raises(ConfigError, match=r"plan\.stages has evaluate; the recipe trains generator, attributes"):
        describe(make_plan(config))
