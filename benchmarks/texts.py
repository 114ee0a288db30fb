"""The texts that are measured on: EmpatheticDialogues where `--data` says where it lies, else the built-in sample."""

from __future__ import annotations

import argparse

from empax.core.types import Instance
from empax.data import sample
from empax.data.dialogues import to_instances


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
