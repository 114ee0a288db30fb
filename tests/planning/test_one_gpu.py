"""What a training step needs at its peak, by the compiler, and which cards have so much."""

import re

import pytest

from configs import reg_t5
from empax.pipeline.plan import make_plan, plain
from empax.planning import one_gpu
from empax.planning.plan import describe
from tests.plans import changed


@pytest.fixture(scope="module")
def config():
    tiny = plain(reg_t5.get_config("no_retrieval,tiny"))
    return changed(tiny, {"plan": {"topology": "gpu", "stages": ("generator",)}})


def test_a_step_is_compiled_for_one_device_and_its_peak_is_named(config, monkeypatch):
    said = describe(make_plan(config))
    assert "compiled for this CPU, which keeps more in float32" in said
    assert "longer:" not in said
    numbers = re.search(r"GB: ([\d.]+) .*, ([\d.]+) temporary .*: ([\d.]+); fits", said)
    held, temporary, peak = map(float, numbers.groups())
    assert temporary > 0
    assert peak == pytest.approx(held + temporary, abs=0.011)
    assert "fits in 80 GB (A100, H100) and 141 GB (H200)" in said
    monkeypatch.setattr(one_gpu, "CARDS", {"a small card": 1.0})
    assert "fits in no card of a small card" in describe(make_plan(config))
