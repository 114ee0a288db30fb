"""The built-in corpus: 320 dialogues written for this project, ten per emotion, so that nothing needs downloading.

Every listener turn has a response intent (Welivita and Pu's taxonomy) and the levels of EPITOME's mechanisms.
"""

from __future__ import annotations

from pathlib import Path

from empax.core.files import read_jsonl
from empax.core.types import MECHANISMS, Dialogue, Utterance
from empax.data.epitome import EpitomePair
from empax.data.knowledge import Fact, facts_from

PATH = Path(__file__).with_name("sample.jsonl")
FACTS = Path(__file__).with_name("sample_facts.jsonl")
_CAUSES = Path(__file__).with_name("sample_spans.jsonl")

SPLITS = {"train": range(1, 9), "validation": range(9, 10), "test": range(10, 11)}
"""Dialogues of each emotion (of ten) by split, by the number at the end of the id."""


def load_dialogues() -> dict[str, list[Dialogue]]:
    """Loads the dialogues by split ("train", "validation", "test"): 256, 32 and 32."""
    splits: dict[str, list[Dialogue]] = {name: [] for name in SPLITS}
    for row in read_jsonl(PATH):
        number = int(row["id"].rsplit("-", 1)[1])
        turns = tuple(Utterance(turn["speaker"], turn["text"]) for turn in row["utterances"])
        dialogue = Dialogue(row["id"], row["emotion"], row["situation"], turns)
        next(dialogues for name, dialogues in splits.items() if number in SPLITS[name]).append(dialogue)
    return splits


def load_facts() -> dict[str, list[Fact]]:
    """Loads facts by instance id, written by hand for 40 instances, some in each split; the others have none."""
    return {row["id"]: facts_from(row["facts"], f"{FACTS}, {row['id']}") for row in read_jsonl(FACTS)}


def load_intents() -> dict[str, str]:
    """Loads response intents by instance id ("sample-sad-03#2")."""
    return {
        f"{row['id']}#{number}": turn["intent"]
        for row in read_jsonl(PATH)
        for number, turn in enumerate(row["utterances"], start=1)
        if turn["speaker"] == "listener"
    }


def load_cause_texts() -> list[tuple[str, int, tuple[str, ...]]]:
    """Loads the causes of the speaker's emotion in 64 speaker turns: (dialogue, turn from 0, words of the causes)."""
    return [(row["id"], row["turn"], tuple(row["spans"])) for row in read_jsonl(_CAUSES)]


def load_annotated_pairs() -> list[EpitomePair]:
    """Loads every listener turn with the speaker's turn before it, and its level of each of EPITOME's mechanisms."""
    pairs = []
    for row in read_jsonl(PATH):
        turns = row["utterances"]
        for i in range(1, len(turns), 2):
            levels = {mechanism: turns[i][mechanism] for mechanism in MECHANISMS}
            pairs.append(EpitomePair(row["id"], f"{row['id']}#{i + 1}", turns[i - 1]["text"], turns[i]["text"], levels))
    return pairs
