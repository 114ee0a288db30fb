"""Shared set-up: eight fake devices, a persistent compilation cache, strict ranks, real data where it is."""

import os
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ.get("EMPAX_CACHE_DIR", str(ROOT / ".jax_cache")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the real corpora; tests that need it say so when it is not there."""
    for folder in (os.environ.get("EMPAX_DATA_DIR"), ROOT.parent / "shared" / "data"):
        if folder and Path(folder).is_dir():
            return Path(folder)
    pytest.skip("no real data: set EMPAX_DATA_DIR to a folder laid out as README.md says")
