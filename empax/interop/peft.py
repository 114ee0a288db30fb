"""LoRA adapters in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, write_json, write_text
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.interop.huggingface import ARCHITECTURES, Config, LazyTensor
from empax.interop.mappings import LINEAR, Layout, Row
from empax.interop.safetensors_out import new_folder, write_tensors
from empax.models.lora import LoraSettings

_TASKS = {"t5": "SEQ_2_SEQ_LM", "bert": "FEATURE_EXTRACTION"}


def adapter_tensors(architecture: str, adapters: Params, config: Config) -> dict[str, np.ndarray]:
    """Adapters under the names that PEFT gives them on the model of transformers.

    Args:
      architecture: a `model_type` of `interop.huggingface.ARCHITECTURES`.
      adapters: of `models.lora.init_adapters`, of the model alone.
      config: of the model.

    Raises:
      ConfigError: the architecture is not known here.
      DataError: it has no such weights.
    """
    leaves, tensors = named_leaves(adapters), {}
    for row in _rows(architecture, adapters, config):
        a, b = (np.asarray(leaves[f"{row.ours}/{part}"]) for part in ("a", "b"))
        stacked = "{layer}" in row.foreign
        for layer in range(a.shape[0]) if stacked else (0,):
            module = f"base_model.model.{_module(row).format(layer=layer)}"
            one_a, one_b = (a[layer], b[layer]) if stacked else (a, b)
            # As PyTorch's Linear: [outputs, inputs], each flattened.
            tensors[f"{module}.lora_A.weight"] = Layout(split=one_a.ndim - 1).to_foreign(one_a)
            tensors[f"{module}.lora_B.weight"] = LINEAR.to_foreign(one_b)
    return tensors


def export_adapters(
    folder: Path,
    architecture: str,
    adapters: Params,
    config: Config,
    settings: LoraSettings,
    *,
    base: str = "",
    card: str = "",
) -> None:
    """Writes adapters as `peft.PeftModel.from_pretrained` reads them.

    Args:
      folder: new or empty.
      architecture: see `adapter_tensors`, as `adapters` and `config`.
      adapters: see there.
      config: see there.
      settings: rank, alpha, dropout.
      base: name or folder of the model that the adapters sit on.
      card: README.md; empty = none.

    Raises:
      ConfigError: the folder is not empty, or the architecture not known here.
      DataError: it has no such weights.
    """
    tensors = adapter_tensors(architecture, adapters, config)
    # One regular expression that all of a module's name must match; layers are adapted all or none.
    modules = [re.escape(_module(row)).replace(r"\{layer\}", r"\d+") for row in _rows(architecture, adapters, config)]
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": _TASKS[architecture],
        "base_model_name_or_path": base or None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": f"({'|'.join(modules)})",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }
    lazy = {name: LazyTensor(array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()}
    with new_folder(folder) as new:
        write_tensors(new, lazy, stem="adapter_model", max_shard_bytes=2**62)  # PEFT reads one file only
        write_json(new / "adapter_config.json", fields)
        if card:
            write_text(new / "README.md", card)


def _rows(architecture: str, adapters: Params, config: Config) -> list[Row]:
    """The rows of the weights that have adapters, in the table's order."""
    if architecture not in _TASKS:
        raise ConfigError(f"adapters of a {architecture!r} cannot be written; those of {', '.join(_TASKS)} can.")
    owners = {name.rpartition("/")[0] for name in named_leaves(adapters)}
    rows = [row for row in ARCHITECTURES[architecture].mapping(config).rows if row.ours in owners]
    if lost := sorted(owners - {row.ours for row in rows}):
        raise DataError(f"a {architecture} has no {', '.join(lost)}; give the adapters of the model alone.")
    return rows


def _module(row: Row) -> str:
    return row.foreign.removesuffix(".weight")
