"""The toy policy that the tests of this folder train."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def toy(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).parent / "toy.py")
