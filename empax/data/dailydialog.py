"""DailyDialog (Li et al. 2017): everyday dialogues of two people, on which EmpRL tests what is left of small talk."""

from __future__ import annotations

import os
import re
from pathlib import Path

from empax.core.config import ConfigError
from empax.core.inputs import note
from empax.core.text_files import DataError, check_length, located, read_lines
from empax.core.types import Dialogue, Instance, Utterance
from empax.data.corpora import find_corpus
from empax.data.dialogues import to_instances

FOLDER = "dailydialog"
"""Where the files lie inside a data folder."""

SPLITS = ("train", "validation", "test")

END_OF_TURN = "__eou__"
"""What closes every turn; a line is a dialogue."""

_JOINS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=\w) ' (?=(?:s|t|m|d|re|ll|[vV]e)\b)"), "'"),
    (re.compile(r"(?<=\w)'Ve\b"), "'ve"),  # "I ' Ve" comes from the corpus's own clean-up
    (re.compile(r"(?<=\d) ([.:]) (?=\d)"), r"\1"),  # 6 . 5; a comma there is as often one between two numbers
    (re.compile(r" (?=[.,!?;:%)])"), ""),
    (re.compile(r"(?<=[$¥(]) "), ""),
)


def find_dailydialog(data_dir: str | os.PathLike[str] | None = None, *, split: str = "test") -> Path:
    """The file of a split: in `data_dir` (else EMPAX_DATA_DIR), or in `dailydialog/` in it.

    Raises:
      ConfigError: no such split, no folder is named, or it does not hold the file.
    """
    if split not in SPLITS:
        raise ConfigError(f"DailyDialog has no split {split!r}; it has {', '.join(SPLITS)}.")
    name = f"dialogues_{split}.txt"
    place = find_corpus("DailyDialog", [name], FOLDER, data_dir) / name
    note(f"DailyDialog, {split}", place)
    return place


def load_dialogues(path: Path | str) -> list[Dialogue]:
    """Reads one file: a dialogue a line, every turn closed by `__eou__`.

    Who begins is the "speaker"; turns alternate. Emotion and situation are empty: the former's labels (seven, by turn)
    lie in another file, and nobody was given the latter. Texts are `written` as people write.

    Raises:
      DataError: no such file, no text in UTF-8, no dialogue in it, or a line that is none (names line and turn).
    """
    path = Path(path)
    prefix = path.stem.removeprefix("dialogues_")
    dialogues, blank = [], 0
    for number, line in read_lines(path):
        if not line.strip():
            blank = blank or number
            continue
        if blank:
            raise DataError(f"{path}, line {blank}: blank, and dialogues follow; take the released file.")
        turns = _turns(line, f"{path}, line {number}")
        dialogues.append(Dialogue(f"dailydialog-{prefix}-{number}", "", "", turns))
    if not dialogues:
        raise DataError(f"{path}, line {max(blank, 1)}: the file ends without a dialogue; take the released file.")
    return dialogues


def _turns(line: str, where: str) -> tuple[Utterance, ...]:
    *texts, rest = line.split(END_OF_TURN)
    if rest.strip() or not texts:
        raise DataError(f"{where}: {(rest.strip() or 'nothing')[:60]!r} stands behind the last {END_OF_TURN}.")
    if len(texts) < 2:
        raise DataError(f"{where}: a dialogue of one turn; it takes two to have one answered.")
    if blank := [turn for turn, text in enumerate(texts, start=1) if not text.strip()]:
        raise DataError(f"{where}: turn {blank[0]} is blank; remove it or the dialogue.")
    located(check_length, *texts, place=where)
    return tuple(Utterance("listener" if number % 2 else "speaker", written(text)) for number, text in enumerate(texts))


def written(text: str) -> str:
    """The text without the blanks that a tokeniser has put before punctuation and around apostrophes.

    Our generators learn from EmpatheticDialogues, where people typed freely; "I ' ll" would be three unknown words.
    Quotation marks and hyphens stay as they are: which side they belong to is not to be seen.
    """
    text = " ".join(text.split())
    for pattern, replacement in _JOINS:
        text = pattern.sub(replacement, text)
    return text


def load_instances(path: Path | str) -> list[Instance]:
    """Every turn from the second on as a response, with all turns before it: small talk has no listener.

    Source: Ma et al. (EmpRL), Sec. V-D, Table VII. The paper leaves open which turns are answered, with how much of
    their history, whether texts are taken as tokenised, and which BLEU is computed; this is ours, the reading that
    leaves nothing out. How much of a history a model sees is a matter of its own limits (`data.sources`), and one that
    is prompted in whole exchanges leaves out the oldest turn of an even number.

    Raises:
      DataError: see `load_dialogues`.
    """
    return to_instances(load_dialogues(path), every_turn=True)
