"""What earlier stages of a run left for later ones: instances with their notes, and candidate exemplars."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from empax.core.config import ConfigError, check_numbers
from empax.core.files import DataError, read_jsonl
from empax.core.inputs import note, noting
from empax.core.manifest import remedy, verify
from empax.core.paths import expand
from empax.core.protocols import Reading, Tokenizer
from empax.core.settings import DataSettings
from empax.core.system import RunContext
from empax.core.types import Dialogue, Instance
from empax.data import empathetic_dialogues, own, sample
from empax.data.batches import draw_dialogues
from empax.data.dialogues import instance_from_row, to_instances
from empax.data.features import SPECIAL_TOKENS
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.data.wheels import NAMED
from empax.data.words import Style

_SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """Pretrained ("minilm", a folder, a Hub name), or made of the training split.

    Attributes:
      kind: of one that is made: "bpe", or "words", whose rare words are unknown (`data.words`).
      tags: whether a pretrained one gets tokens for turns, separator and attributes. False for decoder-only generators,
        which are prompted in words.
      vocab_size: the most tokens, special ones included; a plan reckons with as many.
      lowercase: of "bpe"; "words" are always in lower case.
      min_count: of "words": how often a word comes at least in turns and situations.
      style: of "words": see `data.words.train_words`.
      splits_in_vocabulary: of "words": the splits that they are taken from. MoEL and its descendants take all three, so
        that no word of their test is unknown.
    """

    kind: Literal["bpe", "words"] = "bpe"
    pretrained: str = ""
    tags: bool = True
    vocab_size: int = 12_000
    lowercase: bool = True
    min_count: int = 2
    style: Style = "moel"
    splits_in_vocabulary: tuple[str, ...] = ("train",)

    def __post_init__(self) -> None:
        check_numbers(self, "vocab_size", "min_count", least=1)
        if unknown := sorted(set(self.splits_in_vocabulary) - set(_SPLITS)):
            raise ConfigError(f"splits_in_vocabulary holds {unknown[0]!r}; it takes {', '.join(_SPLITS)}.")
        if "train" not in self.splits_in_vocabulary:
            raise ConfigError(f"splits_in_vocabulary = {self.splits_in_vocabulary} lacks 'train'; add it.")
        if self.kind == "words" and self.pretrained:
            raise ConfigError(f'kind = "words" is made of the corpus; set pretrained = "" (it is {self.pretrained!r}).')


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """Settings of stages of kind "prepare"."""

    tokenizer: TokenizerSettings = dataclasses.field(default_factory=TokenizerSettings)


def load_instances(run: RunContext, split: str) -> list[Instance]:
    """The instances of a split, with the notes of all annotating stages before this one.

    Raises:
      DataError: a file is not what `prepare` or an annotating stage wrote, or two of these write the same note.
    """
    instances = prepared_instances(run, split)
    owners: dict[str, str] = {}
    for stage in run.before():
        if run.plan.stages[stage].kind in ("annotate", "knowledge"):
            instances = _with_notes(instances, run.files.notes(stage, split), owners)
    return instances


def prepared_instances(run: RunContext, split: str) -> list[Instance]:
    """The instances of a split as `prepare` made them; DataError if the file is not what it wrote."""
    path = run.files.instances(split)
    verify(path)
    return [instance_from_row(row) for row in read_jsonl(path)]


def _with_notes(instances: list[Instance], path: Path, owners: dict[str, str]) -> list[Instance]:
    """The instances with the notes in `path`; `owners` has the stage of each note so far, and then these too."""
    stage = path.parent.name
    verify(path)
    if not path.exists():
        return instances
    notes = {str(row.pop("id", "")): row for row in read_jsonl(path)}
    if missing := [i.id for i in instances if i.id not in notes]:
        raise DataError(f"{path} lacks {len(missing)} instances, the first is {missing[0]}. {remedy(stage)}")
    names = dict.fromkeys(name for row in notes.values() for name in row)
    if clash := next((name for name in names if name in owners), ""):
        raise DataError(
            f"{path} and the stage {owners[clash]!r} both write the note {clash!r}; leave one of the two stages out of "
            "config.run."
        )
    owners.update(dict.fromkeys(names, stage))
    return [dataclasses.replace(i, notes={**i.notes, **notes[i.id]}) for i in instances]


def read_corpus(data: DataSettings, split: str) -> Iterable[Dialogue] | None:
    """The dialogues of a split as the corpus has them; None where that has yet to be downloaded.

    Raises:
      DataError: the corpus is not where `data` says, or a line of it cannot be read.
    """
    if data.name == "sample":
        return sample.load_dialogues()[split]
    if data.name == "jsonl":
        return own.read_dialogues(data.dir, split)
    archive = empathetic_dialogues.given_archive(data.dir)
    return None if archive is None else empathetic_dialogues.read_dialogues(archive, split)


def has_emotions(data: DataSettings, split: str) -> bool:
    """Whether any dialogue of a split with a reply names its emotion; corpora other than one's own do."""
    return data.name != "jsonl" or own.has_emotions(data.dir, split)


def planned_instances(run: RunContext, split: str) -> list[Instance]:
    """The instances that `prepare` has left or is going to leave; none where the corpus has yet to be downloaded."""
    if run.files.done("prepare").exists():
        return load_instances(run.at("prepare"), split)
    data = run.plan.data
    with noting():  # the corpus is an input of `prepare`, of no other stage
        if data.name == "jsonl":  # what is drawn depends on the order, which TFDS gives
            dialogues = own.load_dialogues(data.dir, beam=data.beam)[split]
        else:
            dialogues = read_corpus(data, split) or ()
        made = to_instances(dialogues, moel_compat=data.moel_compat)
    return draw_dialogues(made, data.limit)


def planned_notes(run: RunContext) -> list[str]:
    """The notes that stages before this one are going to add to the instances of training."""
    found: list[str] = []
    for stage in (run.plan.stages[name] for name in run.before()):
        if stage.kind == "knowledge":
            found += ["facts", "source"]
        if stage.kind == "annotate":
            found += ["response_attributes"]
            found += ["context_attributes"] * bool(stage.settings.contexts) + ["reasons"] * bool(stage.settings.reasons)
    return found


def check_prepared(run: RunContext) -> None:
    """Raises ConfigError unless the run prepares instances and a tokenizer before this stage."""
    if "prepare" not in run.before():
        raise ConfigError(f"config.run has no stage 'prepare' before {run.stage!r}, which reads what that leaves.")


def check_candidates(run: RunContext, index: str, splits: Sequence[str], passages: int) -> None:
    """Raises ConfigError unless the stage `index`, to which `config.STAGE.index` refers, will leave candidates.

    They are wanted of these splits, at least as many as `passages` for each instance.
    """
    settings = run.earlier("index", index, kind="index").settings
    if missing := [split for split in splits if split not in settings.queries]:
        raise ConfigError(
            f"config.{index}.queries lacks {', '.join(missing)}, which config.{run.stage} needs; set it to how many "
            "instances are to be searched, 0 for all."
        )
    if settings.candidates < passages:
        raise ConfigError(
            f"config.{index}.candidates = {settings.candidates}, but config.{run.stage} reads {passages} passages; "
            "set it to at least as many."
        )


def load_candidates(run: RunContext, index: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Which instances of a split were searched, [n], and their candidates, [n, M] (rows of the index, -1 = none).

    Raises:
      ConfigError: the index stage searched no such split.
    """
    path = run.files.stage(index) / f"candidates_{split}.npz"
    verify(path)
    if not path.exists():
        raise ConfigError(f"{path} is not there: {run.stage} needs {split!r} among config.{index}.queries.")
    with np.load(path) as arrays:
        return arrays["positions"], arrays["ids"]


class PlannedTokenizer:
    """Stands in for a tokenizer that is not at hand: it knows its size and its ids, and reads nothing.

    Only of the frame of a prompt it says how long it is going to be: a token for every four characters.
    """

    pad_id, eos_id, start_id, cls_id, sep_id = 0, 1, 2, 2, 3
    unk_id, rare_words, reading = None, 0, Reading()

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.framing: tuple[list[int], list[int]] = ([], [])

    def encode(self, text: str) -> list[int]:
        return [0] * -(-len(text) // 4)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError("a plan reads no text")

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        raise NotImplementedError("a plan reads no text")

    def mark(self, frame: str) -> str:
        return frame

    def decode(self, ids: Sequence[int], words: Sequence[str] = ()) -> str:
        raise NotImplementedError("a plan writes no text")

    def token_id(self, token: str) -> int:
        return 0


def may_load(run: RunContext, model: str) -> bool:
    """Whether a model is on this machine, or may be fetched: a plan fetches nothing."""
    return not run.planned or model in NAMED or expand(model).exists()


_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.[gG][gG][uU][fF]")
"""What of a model's folder a tokenizer may be made of."""


def pretrained_tokenizer(settings: TokenizerSettings) -> SubwordTokenizer:
    """The tokenizer that `settings.pretrained` names."""
    name = settings.pretrained
    folder = NAMED[name]() if name in NAMED else expand(name)
    if folder.exists():
        files = [path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)]
        note(f"the tokenizer {name!r}", folder, files if folder.is_dir() else None)
    return load_tokenizer(name, extra_tokens=SPECIAL_TOKENS if settings.tags else ())


def run_tokenizer(run: RunContext, *, planned: bool = False) -> Tokenizer:
    """The tokenizer that `prepare` left; `planned`: one of the size that it is going to have."""
    if not planned:
        verify(run.files.tokenizer)
        return load_tokenizer(run.files.tokenizer)
    settings = run.settings("prepare", PrepareSettings).tokenizer
    if settings.pretrained:
        return pretrained_tokenizer(settings)
    return PlannedTokenizer(settings.vocab_size)
