"""A flag of XLA that is set in time, or refused."""

import os
import re

import jax
import pytest

from empax.core import determinism
from empax.core.config import ConfigError
from empax.core.determinism import FLAG, make_deterministic

SET_LATE = """
import sys
import jax
from empax.core.determinism import make_deterministic
make_deterministic()
make_deterministic()
jax.jit(lambda x: x + 1)(1.0)
make_deterministic()  # no effect on a CPU
"""


def test_xla_reads_the_flag_where_it_is_set_before_jax_starts(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    made = command("-c", f"import os; os.environ['XLA_FLAGS'] = '--xla_dump_to={tmp_path}'{SET_LATE}")
    assert made.returncode == 0, made.stderr
    read = [path.read_text() for path in tmp_path.glob("*debug_options*")]
    assert read
    assert all(re.search("xla_gpu_deterministic_ops: true", text) for text in read)


@pytest.fixture
def started(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    return monkeypatch


def test_on_a_cpu_nothing_is_asked_for(started):
    make_deterministic()
    assert os.environ["XLA_FLAGS"] == "--xla_other=1"


def test_a_gpu_that_is_in_use_is_refused_unless_the_flag_was_there(started):
    started.setattr(determinism.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match=rf"comes too late: JAX has begun .*XLA_FLAGS={FLAG}"):
        make_deterministic()
    started.setenv("XLA_FLAGS", f"--xla_other=1 {FLAG}")
    make_deterministic()
