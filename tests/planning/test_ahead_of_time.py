"""What is read of a program that another process compiles, against the executable itself."""

import functools
import multiprocessing
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from empax.core.config import ConfigError
from empax.planning.ahead_of_time import compile_elsewhere, compile_into, libtpu_environment, temporary_bytes
from empax.planning.hlo import Program

BUFFERS = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[4,4]| at ShapeIndex {}:
allocation 1: size 4096, page 0, preallocated-temp:
 value: <1 dot @0> (size=64,offset=0): f32[4,4]{1,0}
allocation 2: size 100, color 2, page 0, preallocated-temp:
allocation 3: size 117440512, color 1, page 0, preallocated-temp:
allocation 4: size 512, page 1, preallocated-temp:
"""


def test_only_main_memory_counts():
    assert temporary_bytes(BUFFERS) == 4096 + 512
    assert temporary_bytes("BufferAssignment:\n") == 0


def write_and_linger(folder):
    """What the compiler does: the program first, and then machine code for a long time."""
    module = "HloModule m\n\nENTRY %main (a: f32[8,8]) -> f32[8,8] {\n  %a = f32[8,8]{1,0} parameter(0)\n"
    module += "  ROOT %dot = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    for name, text in (
        ("m.after_optimizations.txt", module),
        ("m.after_optimizations-buffer-assignment.txt", BUFFERS),
        ("m.after_optimizations_after_buffer_assignment.txt", ""),
    ):
        Path(folder, name).write_text(text)
    time.sleep(600)


def test_nobody_waits_for_machine_code():
    start = time.monotonic()
    program = compile_elsewhere(write_and_linger)
    assert program.work().flops == 2 * 8**3
    assert program.temporary_bytes == 4608
    assert time.monotonic() - start < 120


def run_out_of_memory(folder):
    raise RuntimeError("RESOURCE_EXHAUSTED: used 20.00G of 15.75G hbm")


def end_without_a_word(folder):
    os._exit(9)


@pytest.mark.parametrize(("work", "message"), [(run_out_of_memory, "20.00G of 15.75G"), (end_without_a_word, "ended")])
def test_a_step_that_does_not_compile_says_why(work, message):
    with pytest.raises(ConfigError, match=message):
        compile_elsewhere(work)


@functools.partial(jax.jit, donate_argnums=0)
def update(weights, rows):
    for _ in range(2):
        weights = weights - 0.1 * jax.grad(lambda w: jnp.square(jnp.tanh(rows @ w) @ w.T).sum())(weights)
    return weights


SHAPES = (jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((2**18, 512), jnp.float32))


def lowered_for_tpu():
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    placed = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=SingleDeviceSharding(chip)) for one in SHAPES]
    return update.lower(*placed)


def write_update(folder):
    compile_into(lowered_for_tpu(), folder)


def compile_whole(path):
    with libtpu_environment():
        executable = lowered_for_tpu().compile()
        memory = executable.memory_analysis()
        assert memory is not None
        Path(path).write_text(f"{memory.temp_size_in_bytes}\n{executable.as_text()}")


def test_the_account_is_that_of_the_executable(tmp_path):
    """Where libtpu is installed: temporary bytes to one percent, and the same work."""
    pytest.importorskip("libtpu")
    program, path = compile_elsewhere(write_update), str(tmp_path / "whole")
    whole = multiprocessing.get_context("spawn").Process(target=compile_whole, args=(path,))
    whole.start()
    whole.join()
    temporary, _, text = Path(path).read_text().partition("\n")
    assert program.temporary_bytes == pytest.approx(int(temporary), rel=0.01)
    assert program.work() == Program(text).work()
    assert program.work().flops > 2 * 2 * 2**18 * 512**2
