"""DailyDialog (Li et al. 2017): everyday dialogues of two people, on which EmpRL tests small talk after training."""

from __future__ import annotations

import os
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.inputs import note
from empax.core.text_files import DataError, check_length, located, read_lines
from empax.core.types import Dialogue, Instance, Utterance
from empax.data.corpora import find_corpus
from empax.data.dialogues import alternate, to_instances
from empax.data.english import written
from empax.data.own import SPLITS

FOLDER = "dailydialog"
"""Name of the corpus' folder inside a data folder."""

END_OF_TURN = "__eou__"
"""Marks the end of every turn; a line is a dialogue."""


def find_dailydialog(data_dir: str | os.PathLike[str] | None = None, *, split: str = "test") -> Path:
    """Returns the file of a split: in `data_dir` (else EMPAX_DATA_DIR), or in its subfolder `dailydialog/`.

    Raises ConfigError if there is no such split, no folder is named, or it does not hold the file.
    """
    if split not in SPLITS:
        raise ConfigError(f"DailyDialog has no split {split!r}; it has {', '.join(SPLITS)}.")
    name = f"dialogues_{split}.txt"
    place = find_corpus("DailyDialog", [name], FOLDER, data_dir) / name
    note(f"DailyDialog, {split}", place)
    return place


def load_dialogues(path: Path | str) -> list[Dialogue]:
    """Reads one file: one dialogue per line, every turn followed by `__eou__`.

    The first turn is the "speaker"'s; turns alternate. Emotion and situation are empty: the emotion labels (seven, by
    turn) are in another file, and there are no situations. Texts are detokenised with `english.written`: our generators
    learn from EmpatheticDialogues, where people typed freely; "I ' ll" would be three unknown words. Raises DataError
    if the file is missing, is not UTF-8, holds no dialogue, or has an invalid line (names line and turn).
    """
    path = Path(path)
    prefix = path.stem.removeprefix("dialogues_")
    dialogues, blank = [], 0
    for number, line in read_lines(path):
        if not line.strip():
            blank = blank or number
            continue
        if blank:
            raise DataError(f"{path}, line {blank}: a blank line before other dialogues; use the released file.")
        turns = _turns(line, f"{path}, line {number}")
        dialogues.append(Dialogue(f"dailydialog-{prefix}-{number}", "", "", turns))
    if not dialogues:
        raise DataError(f"{path}, line {max(blank, 1)}: the file ends without a dialogue; use the released file.")
    return dialogues


def _turns(line: str, where: str) -> tuple[Utterance, ...]:
    *texts, rest = line.split(END_OF_TURN)
    if rest.strip() or not texts:
        raise DataError(f"{where}: {(rest.strip() or 'nothing')[:60]!r} comes after the last {END_OF_TURN}.")
    if len(texts) < 2:
        raise DataError(f"{where}: a dialogue of one turn; it must have at least two.")
    if blank := [turn for turn, text in enumerate(texts, start=1) if not text.strip()]:
        raise DataError(f"{where}: turn {blank[0]} is blank; remove it or the dialogue.")
    located(check_length, *texts, place=where)
    return alternate([written(text) for text in texts])


def load_instances(path: Path | str) -> list[Instance]:
    """Loads every turn from the second on as a response, with all turns before it: small talk has no listener.

    Source: Ma et al. (EmpRL), Sec. V-D, Table VII. The paper leaves open which turns are answered, how much of their
    history is used, whether texts stay tokenised, and which BLEU is computed; this reading, which leaves nothing out,
    is ours. Each model truncates the history by its own limits (`data.sources`); one that is prompted in whole
    exchanges leaves out the oldest turn of an even number. Raises DataError as `load_dialogues` does.
    """
    return to_instances(load_dialogues(path), every_turn=True)
