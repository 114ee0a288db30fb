"""Benchmarks set options of the whole process; each test ends without them."""

import os
from collections.abc import Iterator
from unittest import mock

import jax
import pytest
import torch


@pytest.fixture(autouse=True)
def devices_as_before() -> Iterator[None]:
    """Restores JAX's platforms, the environment, and PyTorch's device and threads after each test."""
    platforms, threads = jax.config.jax_platforms, torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield
    jax.config.update("jax_platforms", platforms)
    torch.set_default_device(None)
    torch.set_num_threads(threads)
