"""What a stage compiles, when, and in which thread."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from jax._src import monitoring as unregistered

from empax.core.sharding import LOGICAL, make_mesh
from empax.training import loop
from empax.training.programs import Compiling, make_programs


@pytest.fixture
def compiled():
    """(program, thread) of everything that is compiled meanwhile."""
    found = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append((kwargs.get("fun_name"), threading.current_thread().name.partition("_")[0]))

    monitoring.register_event_duration_secs_listener(listen)
    yield found
    unregistered.unregister_event_duration_listener(listen)


def steps_in(compiled):
    return [thread for name, thread in compiled if name == "jit(step)"]


def test_the_first_update_compiles_in_a_thread_and_once_and_after_the_last_nothing_does(tiny, tmp_path, compiled):
    settings = tiny.settings(steps=3, refresh_every_steps=0)
    tiny.train(tmp_path, validation=None, settings=settings)
    assert steps_in(compiled) == ["compile"]
    (tmp_path / "tiny" / loop.RESULT).unlink()
    jax.clear_caches()
    compiled.clear()
    tiny.train(tmp_path, validation=None, settings=settings)
    assert steps_in(compiled) == []


def test_so_does_the_evaluation_where_the_update_takes_longer(tiny, tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(Compiling, "busy", True)
    settings = tiny.settings(steps=3, buckets=(6,), refresh_every_steps=0)
    result = tiny.train(tmp_path / "beside", settings=settings)
    assert steps_in(compiled) == ["compile"] * 2
    compiled.clear()
    monkeypatch.setattr(Compiling, "busy", False)
    jax.clear_caches()
    after = tiny.train(tmp_path / "after", settings=settings)
    assert sorted(steps_in(compiled)) == ["MainThread", "compile"]
    assert (result.best_value, result.step) == (after.best_value, after.step)


def test_what_compiling_raises_is_raised_where_it_is_waited_for(tiny, tmp_path, monkeypatch):
    def fails(self):
        raise MemoryError("no room")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    with pytest.raises(MemoryError, match="no room"):
        tiny.train(tmp_path, validation=None, settings=tiny.settings(steps=1, refresh_every_steps=0))


@pytest.mark.multidevice
@pytest.mark.parametrize("devices", [1, 2])
def test_the_parameters_that_training_starts_from_stay_in_use_while_its_state_is_donated(tiny, devices):
    batch = tiny.TinyExamples(8).collate(np.arange(8), tiny.LENGTH, np.random.default_rng(0))
    mesh = make_mesh(devices=jax.devices()[:devices])
    programs = make_programs(tiny.TinyTask(), tiny.settings(), batch, mesh=mesh, logical=LOGICAL)
    source = jax.jit(tiny.TinyTask().init)(jax.random.key(1), batch)
    state = programs.first_state(lambda fresh: source)
    jax.jit(lambda params: jax.tree.map(jnp.negative, params), donate_argnums=0)(state.params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(source))
