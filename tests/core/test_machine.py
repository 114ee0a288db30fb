"""A GPU is known before JAX starts, and a recipe takes the form for it by itself."""

from importlib import metadata

import jax
import numpy as np
import pytest

from configs import common
from empax.core import machine, recipe
from empax.core.config import ConfigError
from empax.core.recipe import load_recipe, recipes, sized_for_this_machine


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """A machine with a GPU and JAX's plugin for it."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "_DEVICES", (str(tmp_path / "nvidia0"),))
    plugins = [metadata.EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: plugins if group == "jax_plugins" else [])
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_gpu_is_seen_by_its_device_and_plugin(seen):
    assert machine.has_gpu()
    with seen.context() as changed:
        changed.setattr(metadata, "entry_points", lambda group: [])
        assert not machine.has_gpu()
    seen.setattr(machine, "_DEVICES", ("/dev/none",))
    assert not machine.has_gpu()


@pytest.mark.parametrize(
    ("name", "value", "has"),
    [("JAX_PLATFORMS", "cpu", False), ("JAX_PLATFORMS", "cuda,cpu", True), ("CUDA_VISIBLE_DEVICES", "", False),
     ("CUDA_VISIBLE_DEVICES", "0", True)],
)  # fmt: skip
def test_the_environment_says_what_jax_may_use(name, value, has, seen):
    seen.setenv(name, value)
    assert machine.has_gpu() == has


@pytest.mark.parametrize(
    ("spec", "sized"),
    [
        ("reg_t5", "reg_t5:machine=gpu"),
        ("classic:moel", "classic:moel,machine=gpu"),
        ("configs/classic.py:moel, lineage", "configs/classic.py:moel,lineage,machine=gpu"),
        ("finetune:MODEL,lora", "finetune:MODEL,lora,machine=gpu"),
        ("classic:moel,machine=cpu", "classic:moel,machine=cpu"),
        ("reg_t5:xl,machine=v5e:16x16", "reg_t5:xl,machine=v5e:16x16"),
        ("reg_t5:tiny", "reg_t5:tiny"),
        ("quickstart", "quickstart"),  # has one size
    ],
)
def test_a_recipe_takes_the_form_for_a_gpu_unless_another_was_asked_for(spec, sized, monkeypatch):
    monkeypatch.setattr(recipe, "has_gpu", lambda: True)
    assert sized_for_this_machine(spec) == sized
    monkeypatch.setattr(recipe, "has_gpu", lambda: False)
    assert sized_for_this_machine(spec) == spec


NAMED = {"finetune": "MODEL", "published": "empathetic-t5-small"}
SIZED = [name for name in recipes() if hasattr(recipe._module(recipes()[name]), "MACHINES")]


@pytest.mark.parametrize("name", SIZED)
def test_every_recipe_lies_on_a_gpu_in_few_programs_and_the_cpu_form_is_the_default(name):
    words = NAMED.get(name, "")
    plain = load_recipe(f"{name}:{words}")
    gpu, cpu = (load_recipe(f"{name}:{','.join(filter(None, [words, f'machine={m}']))}") for m in ("gpu", "cpu"))
    assert plain == cpu
    models = dict(common._models(gpu))
    assert bool(models) == (name != "classic")  # a single layer
    for model in models.values():
        assert model.unroll == 12
        assert model.remat == ("minimal" if "llm" in name and model is models["generator"] else "none")
    for stage in gpu.run:
        assert len(gpu[stage].get("buckets", ())) <= 2
        assert gpu[stage].get("store", {}).get("method", "exact") == "exact"


def test_a_large_model_computes_again_on_a_gpu_and_a_slice_keeps_its_layout():
    assert load_recipe("reg_t5:large").reg.generator.remat == "full"
    assert load_recipe("reg_t5:base").reg.generator.remat == "none"
    slice_ = load_recipe("reg_t5:base,machine=v5e:16x16")
    assert (slice_.reg.generator.remat, "unroll" in slice_.reg.generator) == ("full", False)
    assert slice_.index.store.method == "scann"


def test_the_log_names_the_form_and_jax_must_compute_on_the_gpu(command, tmp_path):
    words = ["main", "--config=classic:moel", f"--workdir={tmp_path / 'run'}"]
    gpu = "from empax.core import recipe; recipe.has_gpu = lambda: True"
    run = f"import sys; {gpu}; from empax import main; sys.argv = {words}; main.command_line()"
    said = command("-c", run)
    assert said.returncode == 2
    assert "This machine has a GPU: the recipe is classic:moel,machine=gpu; machine=cpu overrides." in said.stderr
    assert "classic:moel,machine=gpu was chosen for this machine's GPU" in said.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("device", "order"), [("cpu", "0 0 1 1 2 2"), ("gpu", "0 1 0 2 1 2")])
def test_a_gpu_computes_while_the_next_batch_is_asked_for_and_none_is_lost(device, order):
    said = []

    def asked():
        for number in range(3):
            said.append(str(number))
            yield number, {"array": jax.numpy.full(2, number)}

    with machine.planned_for(device):
        for number, found in machine.fetched(asked()):
            said.append(str(number))
            assert isinstance(found["array"], np.ndarray)
            assert found["array"].tolist() == [number, number]
    assert " ".join(said) == order


def test_a_gpu_that_jax_passes_over_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"was chosen .* cpu; repair its CUDA plugin, or write machine=cpu"):
        machine.check_gpu("classic:machine=gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    machine.check_gpu("classic:machine=gpu")
