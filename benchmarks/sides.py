"""One random model on both sides, and checks of their agreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.typing import DTypeLike

from benchmarks.paired import DisagreementError, cores
from benchmarks.shapes import auto_class, kind_of
from empax.interop.huggingface import model_config
from empax.interop.parameters import import_params
from empax.models.bert import BertEncoder
from empax.models.decoder_only import DecoderOnly
from empax.models.transformer import EncoderDecoder

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Maximum relative error (of all numbers together) for agreement of both sides."""


class Sides(NamedTuple):
    """The same weights on both sides."""

    model: Any
    params: Any
    theirs: Any


def random_model(fields: Mapping[str, Any], *, param_dtype: DTypeLike = np.float32, **changes: Any) -> Sides:
    """Builds a model that Hugging Face initialises in memory, and the same model by our tables.

    Args:
      fields: fields of its `config.json`, including `model_type`.
      param_dtype: type of our parameters; theirs are float32.
      changes: changed fields of our config, for example `unroll`.
    """
    torch.manual_seed(0)
    torch.set_num_threads(cores())
    rest = dict(fields)
    name = rest.pop("model_type")
    made, options = auto_class(name)
    described = transformers.AutoConfig.for_model(name, **rest)
    with torch.device("cpu"):
        theirs = getattr(transformers, made).from_config(described, **options).eval()
    tensors = {key: value.detach().numpy() for key, value in theirs.state_dict().items()}
    config = model_config(described.to_dict(), **changes)
    params = import_params(name, tensors, config, dtype=param_dtype)
    makers: dict[str, Any] = {"encoder-decoder": EncoderDecoder, "decoder": DecoderOnly, "encoder": BertEncoder}
    return Sides(makers[kind_of(name)](config), params, theirs)


def use(device: str) -> None:
    """Makes JAX compute on `device`, "cpu" or "gpu". Call it before any computation.

    Raises:
      DisagreementError: the device is a GPU, and one of the sides has none.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    backend = jax.default_backend()
    if device == "gpu" and not (backend == "gpu" and torch.cuda.is_available()):
        raise DisagreementError(
            f"--device=gpu: JAX computes on {backend}, PyTorch has {torch.cuda.device_count()} GPUs."
        )


def on_device(device: str, *modules: torch.nn.Module) -> None:
    """Moves PyTorch's side and all later tensors to the device."""
    where = {"cpu": "cpu", "gpu": "cuda"}[device]
    torch.set_default_device(where)
    for module in modules:
        module.to(where)


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Returns PyTorch's autocast for its device; disabled in float32."""
    return torch.autocast(torch.get_default_device().type, dtype=dtype, enabled=dtype != torch.float32)


def wait() -> None:
    """Waits for PyTorch's device."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


def check_agreement(what: str, ours: Any, theirs: Any, *, tolerance: float) -> float:
    """Returns the relative error of `ours`.

    Raises:
      DisagreementError: it is above `tolerance`, or a value is not finite.
    """
    found = np.asarray(jnp.asarray(ours, jnp.float32), np.float64)
    expected = np.asarray(theirs, np.float64)
    error = float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))
    if not error <= tolerance:
        raise DisagreementError(f"{what}: relative error {error:.2g}, must be at most {tolerance:.2g}.")
    return error
