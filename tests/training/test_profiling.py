"""A look at some updates: of the program that runs, and never the end of training."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from empax.core.sharding import MeshSettings, make_mesh
from empax.training import profiling
from empax.training.profiling import Profiler


class Step:
    """A jitted step that keeps what it is lowered with."""

    def __init__(self, jitted):
        self.jitted, self.lowered = jitted, []

    def __call__(self, *args):
        return self.jitted(*args)

    def lower(self, *args):
        self.lowered.append(self.jitted.lower(*args))
        return self.lowered[-1]


@pytest.mark.multidevice
def test_the_program_that_is_read_is_the_one_that_ran(tmp_path):
    """What is frozen is split over devices, and the step leaves its place to the arguments."""
    mesh = make_mesh(MeshSettings(fsdp=4), jax.devices()[:4])
    split, rows = (NamedSharding(mesh, PartitionSpec(axes)) for axes in ("fsdp", ("data", "fsdp")))
    jitted = jax.jit(
        lambda state, frozen, batch, scale: state * scale + (batch @ frozen).sum(0)[:, None],
        donate_argnums=0, in_shardings=(split, None, rows, None), out_shardings=split,
    )  # fmt: skip

    def arguments():
        # The scale lies nowhere in particular, and has the type that a Python number has.
        placed = ((8, 4), split), ((16, 8), split), ((8, 16), rows)
        return *(jax.device_put(jnp.ones(shape), place) for shape, place in placed), jnp.asarray(2.0)

    ran = jitted.lower(*arguments()).compile().as_text()
    assert "all-gather" in ran
    step = Step(jitted)
    result = Profiler(tmp_path, first=0, updates=1).watch(step)(*arguments())
    np.testing.assert_array_equal(result, 2 + 8 * 16)
    (read,) = step.lowered
    assert read.compile().as_text() == ran


def break_start(monkeypatch):
    def start(_):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", start)


def break_stop(monkeypatch):
    real = jax.profiler.stop_trace

    def stop():
        real()
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", stop)


def break_report(monkeypatch):
    def report(*_):
        raise KeyError("traceEvents")

    monkeypatch.setattr(profiling, "expensive_operations", report)


@pytest.mark.parametrize(
    ("broken", "steps", "message"),
    [
        (break_start, 4, "RuntimeError: Only one profile may be run at a time."),
        (break_stop, 4, "OSError: No space left on device"),
        (break_stop, 2, "OSError: No space left on device"),  # where the end of training cuts the trace short
        (break_report, 4, "KeyError: 'traceEvents'"),
    ],
)
def test_a_profile_that_fails_is_a_warning(broken, steps, message, tmp_path, monkeypatch, caplog):
    broken(monkeypatch)
    caplog.set_level(logging.INFO, logger="empax")
    state = jnp.zeros(2)
    with contextlib.closing(Profiler(tmp_path, first=1, updates=2)) as profiler:
        step = profiler.watch(jax.jit(lambda state: state + 1))
        for _ in range(steps):
            state = step(state)
    np.testing.assert_array_equal(state, steps)
    assert [(row.levelname, row.getMessage()) for row in caplog.records] == [("WARNING", f"no profile: {message}")]


def test_what_goes_wrong_in_the_step_itself_is_no_matter_of_the_profile(tmp_path):
    def step(*_):
        raise FloatingPointError("not a number")

    profiler = Profiler(tmp_path, first=0)
    with pytest.raises(FloatingPointError, match="not a number"):
        profiler.watch(step)(np.ones(2))
    assert profiler.tracing
    profiler.close()
    assert not profiler.tracing
