"""What an adapter does to weights that a model has under several names, or not at all: refused with what helps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from empax.core.config import ConfigError
from empax.interop.mappings import Mapping
from empax.interop.readers import merge_advice
from empax.interop.tensors import Tensors
from empax.interop.tied_embeddings import disagreements

HEAD = "lm_head.weight"

_UNTIE = (
    "The model's head is its token embedding, and merge_and_unload() alone would change both. Untie them first where "
    "PEFT is installed: `model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), FOLDER)` "
    "(AutoModelForSeq2SeqLM of an encoder-decoder), `head = model.get_output_embeddings()`, `head = getattr(head, "
    "'base_layer', head)`, `head.weight = torch.nn.Parameter(head.weight.detach().clone())`, `model = "
    "model.merge_and_unload()`, `model.config.tie_word_embeddings = False`, `model.save_pretrained(OUT)`. Save the "
    "tokenizer there too, and give OUT."
)


def check_adapted(folder: Path, mapping: Mapping, modules: Iterable[str]) -> None:
    """Raises ConfigError for a low-rank adapter on one of several names of the token embedding.

    Args:
      folder: of the adapter, for the message.
      mapping: the model's table.
      modules: what the adapter is on, as the table names it.
    """
    for module in modules:
        weight = f"{module}.weight"
        if mapping.ties(weight) or (mapping.tied and weight == mapping.embedding()):
            if _in_stacks(mapping) and weight != HEAD:
                raise ConfigError(_of_stacks(folder, module))
            raise ConfigError(f"{folder}: the adapter is on {module}, which is not read here. {_UNTIE}")


def check_replaced(
    folder: Path, mapping: Mapping, saved: Tensors, *, asked: Collection[str], known: Collection[str]
) -> None:
    """Raises ConfigError for a tensor that replaces one of several names of the token embedding, or nothing.

    Args:
      folder: of the adapter, for the message.
      mapping: the model's table.
      saved: what the adapter replaces whole, as the table names it.
      asked: those that `modules_to_save` names.
      known: all names of the model's weights.
    """
    embedding = mapping.embedding()
    copies = [name for name in saved if mapping.ties(name) and name != HEAD]
    if _in_stacks(mapping) and embedding in asked:
        copies.append(embedding)  # PEFT replaces this one alone, which neither stack reads
    if copies:
        raise ConfigError(_of_stacks(folder, copies[0].removesuffix(".weight")))
    if mapping.ties(HEAD):
        replaced = [name for name in (embedding, HEAD) if name in saved]
        if len(replaced) == 1:
            raise ConfigError(
                f"{folder}: the adapter replaces {replaced[0]} alone, of two embeddings that its model ties, so that "
                f"they differ. {merge_advice()}"
            )
        if disagreements(saved, embedding, tied=True):
            raise ConfigError(
                f"{folder}: the adapter replaces {embedding} and {HEAD}, which its model ties, by two that differ. "
                f"{merge_advice()}"
            )
    if strange := sorted(name for name in asked if name not in known and not mapping.ignores(name)):
        raise ConfigError(
            f"{folder}: the adapter brings {', '.join(strange)}, which is no part of the model here: heads for classes "
            "are not read. An encoder can be had without its head where PEFT is installed: "
            "`PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(BASE), FOLDER)"
            ".merge_and_unload().base_model.save_pretrained(OUT)`; save the tokenizer there too, and give OUT."
        )


def _in_stacks(mapping: Mapping) -> bool:
    """Whether encoder and decoder have names of their own for the token embedding."""
    return len(mapping.tied) > mapping.ties(HEAD)


def _of_stacks(folder: Path, module: str) -> str:
    return (
        f"{folder}: the adapter changes {module} alone, but encoder and decoder share one embedding here, and merging "
        "would change all; train the adapter without it (target_modules, modules_to_save)."
    )
