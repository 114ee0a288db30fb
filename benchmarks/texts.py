"""The texts that are measured on: EmpatheticDialogues where `--data` says where it lies, else the built-in sample."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from empax.core.types import Instance
from empax.data import sample
from empax.data.bpe import train_bpe
from empax.data.dialogues import to_instances
from empax.data.sources import LayoutSettings, TaggedForm, Text
from empax.data.tokenizers import SubwordTokenizer


def add_flag(parser: argparse.ArgumentParser) -> None:
    """`--data`, for `instances`."""
    parser.add_argument("--data", default="", help="folder or archive of EmpatheticDialogues; empty = the sample")


def instances(data: str, split: str) -> list[Instance]:
    """Every listener turn of a split, in the corpus's order."""
    if not data:
        return to_instances(sample.load_dialogues()[split])
    # Here and not above: it imports TFDS, which takes seconds.
    from empax.data.empathetic_dialogues import find_archive, read_dialogues

    return to_instances(read_dialogues(find_archive(data), split))


def name_of(data: str) -> str:
    """What a report calls the texts."""
    return "EmpatheticDialogues" if data else "the built-in sample"


def tokenizer_of(found: Sequence[Instance], vocab_size: int) -> SubwordTokenizer:
    """One that is trained on the texts, small enough for a model of so many tokens."""
    return train_bpe([turn for i in found for turn in (*i.context, i.response)], vocab_size=vocab_size - 20)


def joined_form(tokenizer: SubwordTokenizer, length: int) -> TaggedForm:
    """Context and exemplar in one passage, at most so many tokens of each."""
    layout = LayoutSettings(max_context_tokens=length, max_passage_tokens=length)
    return TaggedForm(tokenizer, layout, attributes=False, exemplars="joined")


def with_exemplars(
    form: TaggedForm, chosen: Sequence[Instance], corpus: Sequence[Instance], num: int, rng: np.random.Generator
) -> list[list[tuple[Text, Text]]]:
    """`num` passages of each instance: its context beside an exemplar of the corpus.

    Any exemplars have real lengths; retrieving them would change nothing that is measured.
    """
    passages = form.passages(corpus)
    drawn = [[passages[j] for j in rng.integers(len(corpus), size=num)] for _ in chosen]
    return [[(context, one) for one in some] for context, some in zip(form.contexts(chosen), drawn, strict=True)]


def passage_tokens(row: Sequence[tuple[Text, Text]], limit: int) -> int:
    """Of the longest passage: context, separator, exemplar."""
    return min(max(context.size + 1 + exemplar.size for context, exemplar in row), limit)


def passage_arrays(
    form: TaggedForm, rows: Sequence[Sequence[tuple[Text, Text]]], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, [B, K, length]."""
    flat: list[tuple[Text, Text | None] | None] = [pair for row in rows for pair in row]
    ids, mask = (array.reshape(len(rows), -1, length) for array in form.arrays(flat, length))
    return ids, mask
