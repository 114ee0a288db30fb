"""The toy policy that the tests of this folder train."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).parent / "toy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
