"""The tiny task that the tests of this folder train."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tiny(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).parent / "tiny.py")


@pytest.fixture(autouse=True)
def out_of_the_collectors_sight_each_time(out_of_the_collectors_sight: None) -> None:
    """As for a module: these tests call the collector most."""
    gc.freeze()
