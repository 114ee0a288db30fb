"""What a training step needs at its peak, by the compiler, and which cards have so much."""

import re
import types

import jax.numpy as jnp
import pytest

from configs import reg_t5
from empax.core.machine import backend
from empax.models.attention_kernels import is_fused
from empax.pipeline.plan import make_plan, plain
from empax.planning import one_gpu, slices
from empax.planning.plan import describe
from tests.plans import changed


@pytest.fixture(scope="module")
def config():
    tiny = plain(reg_t5.get_config("no_retrieval,tiny"))
    return changed(tiny, {"plan": {"topology": "gpu", "stages": ("generator",)}})


def numbers(said):
    found = re.search(r"GB: ([\d.]+) .*, ([\d.]+) temporary .*: ([\d.]+); (fits in .*)", said)
    return *map(float, found.groups()[:3]), found[4]


@pytest.mark.parametrize(
    ("temporary", "room"),
    [
        (5e9, "fits in 80 GB (A100, H100) and 141 GB (H200)"),
        (100e9, "fits in 141 GB (H200)"),
        (200e9, "fits in neither 80 GB (A100, H100) nor 141 GB (H200)"),
    ],
)
def test_the_peak_of_a_step_is_named_with_the_cards_that_have_it(temporary, room, config, monkeypatch):
    compiled = types.SimpleNamespace(temporary_bytes=temporary)
    monkeypatch.setattr(one_gpu, "compile_elsewhere", lambda work, by_cpu: compiled)
    said = describe(make_plan(config))
    assert "compiled for this CPU, which keeps more in float32" in said
    assert "longer:" not in said
    assert numbers(said) == (0.0, temporary / 1e9, temporary / 1e9, room)  # a tiny state


def test_without_a_gpu_its_program_is_compiled_but_for_calls_of_cudnn(config, monkeypatch):
    """It has logits of all target cells, which take much of the memory."""
    found = []

    def lower():
        return backend(), is_fused("auto", 256, 256, 64, jnp.bfloat16, dropped=False)

    monkeypatch.setattr(slices, "lay_out", lambda *given: types.SimpleNamespace(lower=lower))
    monkeypatch.setattr(slices, "compile_into", lambda lowered, folder: found.append(lowered))
    slices.write_program(config, "generator", "gpu", "")
    assert found == [("gpu", False)]


@pytest.mark.slow
def test_what_the_compiler_allocates_for_more_rows_is_more(config):
    few, many = (
        describe(make_plan(changed(config, {"generator.batch_size": rows, "generator.buckets": (80,)})))
        for rows in (64, 512)
    )
    assert numbers(many)[1] > 4 * numbers(few)[1] > 0
