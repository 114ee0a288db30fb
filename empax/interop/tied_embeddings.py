"""Tied embeddings: checks that model, checkpoint and adapter agree about which embeddings are shared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.interop.layouts import plain_names
from empax.interop.mappings import Mapping as Table
from empax.interop.readers import MERGE_ADVICE, open_tensors
from empax.interop.tensors import Tensor, Tensors

HEAD = "lm_head.weight"

_UNTIE = (
    "The model's head is its token embedding, and merge_and_unload() alone would change both. Untie them first where "
    "PEFT is installed: `model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)` "
    "(AutoModelForSeq2SeqLM of an encoder-decoder), `head = model.get_output_embeddings()`, `head = getattr(head, "
    "'base_layer', head)`, `head.weight = torch.nn.Parameter(head.weight.detach().clone())`, `model = "
    "model.merge_and_unload()`, `model.config.tie_word_embeddings = False`, `model.save_pretrained(OUT)`. Save the "
    "tokenizer there too, and give OUT."
)


def disagreements(tensors: Tensors, embedding: str, *, tied: bool, scaled: bool = False) -> list[str]:
    """Lists where the model has one embedding and `tensors` two different ones.

    `tied`: whether the model's head is its token embedding; `scaled`: whether its logits are scaled, as those of a T5
    v1.0 are. `embedding` is the foreign name of the token embedding.
    """
    if embedding not in tensors:
        return []
    problems = [
        f"{name} is not {embedding}, but encoder and decoder share one embedding here"
        for name in sorted(tensors)
        if name.endswith("coder.embed_tokens.weight") and not _same(tensors[name], tensors[embedding])
    ]
    if tied and has_own_head(tensors, embedding):
        advice = "set tie_word_embeddings to false" + (" and scale_decoder_outputs to true" if scaled else "")
        problems.append(f"{HEAD} is not {embedding}, but the config ties them: {advice}")
    return problems


def t5_head(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the `fields` of a T5 or an mT5, with `tie_word_embeddings` from its weights instead of config.json.

    Transformers 5 always writes true, and decides by the weights alone whether the head is shared. Another field,
    `scale_decoder_outputs`, says whether the logits of a T5 are scaled; in older files the first field says that too.
    """
    said = {} if fields.get("tie_word_embeddings") is None else {"tie_word_embeddings": fields["tie_word_embeddings"]}
    if fields["model_type"] == "t5":
        scaled = fields.get("scale_decoder_outputs")
        said["scale_decoder_outputs"] = said.get("tie_word_embeddings", True) if scaled is None else scaled
    try:
        tensors = plain_names(open_tensors(folder), fields["model_type"])
    except DataError:
        return {**fields, **said}  # reading the weights will raise it again
    return {**fields, **said, "tie_word_embeddings": not has_own_head(tensors, "shared.weight")}


def has_own_head(tensors: Tensors, embedding: str) -> bool:
    """Whether `tensors` hold a head that differs from the token embedding, whose foreign name is `embedding`."""
    return HEAD in tensors and embedding in tensors and not _same(tensors[HEAD], tensors[embedding])


def _same(one: Tensor, other: Tensor, rows: int = 4096) -> bool:
    """Whether two tensors are equal; compares a few rows at a time, to keep intermediate arrays small."""
    if one.shape != other.shape:
        return False
    a, b = np.asarray(one), np.asarray(other)
    return all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))


def check_adapted(folder: Path, mapping: Table, modules: Iterable[str]) -> None:
    """Raises ConfigError for a low-rank adapter on one of several names of the token embedding.

    `modules` are the adapted modules of the adapter in `folder`, by the table's names.
    """
    for module in modules:
        weight = f"{module}.weight"
        if mapping.ties(weight) or (mapping.tied and weight == mapping.embedding()):
            if _in_stacks(mapping) and weight != HEAD:
                raise ConfigError(_of_stacks(folder, module))
            raise ConfigError(f"{folder}: the adapter is on {module}, which is not read here. {_UNTIE}")


def check_replaced(
    folder: Path, mapping: Table, saved: Tensors, *, asked: Collection[str], known: Collection[str]
) -> None:
    """Raises ConfigError for a tensor that replaces only one of the token embedding's names, or no weight.

    All names are the table's: of the tensors in the adapter that replace weights (`saved`), of those in its
    `modules_to_save` (`asked`), and of all weights of the model (`known`).
    """
    embedding = mapping.embedding()
    copies = [name for name in saved if mapping.ties(name) and name != HEAD]
    if _in_stacks(mapping) and embedding in asked:
        copies.append(embedding)  # PEFT replaces only this one, which neither stack reads
    if copies:
        raise ConfigError(_of_stacks(folder, copies[0].removesuffix(".weight")))
    if mapping.ties(HEAD):
        replaced = [name for name in (embedding, HEAD) if name in saved]
        if len(replaced) == 1:
            raise ConfigError(
                f"{folder}: the adapter replaces only {replaced[0]} of two embeddings that its model ties, so they "
                f"differ. {MERGE_ADVICE}"
            )
        if disagreements(saved, embedding, tied=True):
            raise ConfigError(
                f"{folder}: the adapter replaces {embedding} and {HEAD}, which its model ties, with two that differ. "
                f"{MERGE_ADVICE}"
            )
    if strange := sorted(name for name in asked if name not in known and not mapping.ignores(name)):
        raise ConfigError(
            f"{folder}: the adapter brings {', '.join(strange)}, which is not part of the model here: classification "
            "heads are not read. To get the encoder without its head, where PEFT is installed: "
            "`PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(BASE), "
            "FOLDER).merge_and_unload().base_model.save_pretrained(OUT)`; save the tokenizer there too, and give OUT."
        )


def _in_stacks(mapping: Table) -> bool:
    """Whether encoder and decoder have separate names for the token embedding."""
    return len(mapping.tied) > mapping.ties(HEAD)


def _of_stacks(folder: Path, module: str) -> str:
    return (
        f"{folder}: the adapter changes {module} alone, but encoder and decoder share one embedding here, and merging "
        "would change all; train the adapter without it (target_modules, modules_to_save)."
    )
