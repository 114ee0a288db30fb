"""A look at some updates is never the end of training."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.training.profiling import Profiler


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


@pytest.mark.parametrize(
    ("broken", "steps", "message"),
    [
        (break_start, 4, "RuntimeError: Only one profile may be run at a time."),
        (break_stop, 4, "OSError: No space left on device"),
        (break_stop, 2, "OSError: No space left on device"),  # where the end of training cuts the trace short
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


def test_training_that_ends_before_the_trace_begins_is_a_warning(tmp_path, caplog):
    with contextlib.closing(Profiler(tmp_path, first=3)) as profiler:
        step = profiler.watch(lambda state: state + 1)
        for state in range(3):
            step(state)
    assert [row.getMessage() for row in caplog.records] == [
        "no profile: the trace begins after 3 steps; this process made 3."
    ]
