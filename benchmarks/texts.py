"""The texts of the benchmarks: EmpatheticDialogues from `--data`, else the built-in sample."""

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
    """Adds `--data`, for `instances`."""
    parser.add_argument("--data", default="", help="folder or archive of EmpatheticDialogues; empty = the sample")


def instances(data: str, split: str) -> list[Instance]:
    """Returns every listener turn of a split, in the corpus's order."""
    if not data:
        return to_instances(sample.load_dialogues()[split])
    # Imported here, since it imports TFDS, which takes seconds.
    from empax.data.empathetic_dialogues import find_archive, read_dialogues

    return to_instances(read_dialogues(find_archive(data), split))


def name_of(data: str) -> str:
    """Returns the name of the texts in a report."""
    return "EmpatheticDialogues" if data else "the built-in sample"


def tokenizer_of(found: Sequence[Instance], vocab_size: int) -> SubwordTokenizer:
    """Trains a tokenizer on the texts, small enough for a vocabulary of `vocab_size`."""
    return train_bpe([turn for i in found for turn in (*i.context, i.response)], vocab_size=vocab_size - 20)


def joined_form(tokenizer: SubwordTokenizer, length: int) -> TaggedForm:
    """Returns the form with context and exemplar in one passage, at most `length` tokens of each."""
    layout = LayoutSettings(max_context_tokens=length, max_passage_tokens=length)
    return TaggedForm(tokenizer, layout, attributes=False, exemplars="joined")


def with_exemplars(
    form: TaggedForm, chosen: Sequence[Instance], corpus: Sequence[Instance], num: int, rng: np.random.Generator
) -> list[list[tuple[Text, Text]]]:
    """Returns `num` passages of each instance: its context with a random exemplar of the corpus.

    Random exemplars have realistic lengths; retrieving them would not change the measurements.
    """
    passages = form.passages(corpus)
    drawn = [[passages[j] for j in rng.integers(len(corpus), size=num)] for _ in chosen]
    return [[(context, one) for one in some] for context, some in zip(form.contexts(chosen), drawn, strict=True)]


def passage_tokens(row: Sequence[tuple[Text, Text]], limit: int) -> int:
    """Returns the number of tokens of the longest passage: context, separator, exemplar."""
    return min(max(context.size + 1 + exemplar.size for context, exemplar in row), limit)


def passage_arrays(
    form: TaggedForm, rows: Sequence[Sequence[tuple[Text, Text]]], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask, [B, K, length]."""
    flat: list[tuple[Text, Text | None] | None] = [pair for row in rows for pair in row]
    ids, mask = (array.reshape(len(rows), -1, length) for array in form.arrays(flat, length))
    return ids, mask
