"""Outputs of earlier stages of a run for later ones: instances with their notes, and candidate exemplars."""

from __future__ import annotations

import contextlib
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


@dataclasses.dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a tokenizer that is pretrained ("minilm", a folder, a Hub name), or trained on the training split.

    Attributes:
      kind: kind of a trained tokenizer: "bpe", or "words", whose rare words are unknown (`data.words`).
      tags: whether a pretrained tokenizer gets tokens for turns, separator and attributes. False for decoder-only
        generators, which are prompted in words.
      vocab_size: maximum number of tokens, special tokens included; a plan assumes this number.
      lowercase: whether "bpe" lower-cases texts; "words" always does.
      min_count: fewest occurrences of a word in turns and situations, for "words".
      style: word splitting of "words", see `data.words.train_words`.
      splits_in_vocabulary: the splits whose words "words" contains. MoEL and its descendants use all three, so that no
        word of their test is unknown.
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
        if unknown := sorted(set(self.splits_in_vocabulary) - set(own.SPLITS)):
            raise ConfigError(f"splits_in_vocabulary holds {unknown[0]!r}; it takes {', '.join(own.SPLITS)}.")
        if "train" not in self.splits_in_vocabulary:
            raise ConfigError(f"splits_in_vocabulary = {self.splits_in_vocabulary} lacks 'train'; add it.")
        if self.kind == "words" and self.pretrained:
            raise ConfigError(
                f'kind = "words" is built from the corpus; set pretrained = "" (it is {self.pretrained!r}).'
            )


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """Settings of stages of kind "prepare"."""

    tokenizer: TokenizerSettings = dataclasses.field(default_factory=TokenizerSettings)


def load_instances(run: RunContext, split: str) -> list[Instance]:
    """Loads the instances of a split, with the notes of all annotating stages before this one.

    Raises DataError if a file of `prepare` or an annotating stage was altered.
    """
    instances = prepared_instances(run, split)
    for stage in run.before():
        if run.plan.stages[stage].kind in ("annotate", "knowledge"):
            instances = _with_notes(instances, run.files.notes(stage, split))
    return instances


def prepared_instances(run: RunContext, split: str) -> list[Instance]:
    """Loads the instances of a split as `prepare` wrote them; DataError if the file was altered."""
    path = run.files.instances(split)
    verify(path)
    return [instance_from_row(row) for row in read_jsonl(path)]


def _with_notes(instances: list[Instance], path: Path) -> list[Instance]:
    """Adds the notes in `path` to the instances; those of two stages have different names (`check_sole`)."""
    stage = path.parent.name
    verify(path)
    if not path.exists():
        return instances
    notes = {str(row.pop("id", "")): row for row in read_jsonl(path)}
    if missing := [i.id for i in instances if i.id not in notes]:
        raise DataError(f"{path} lacks {len(missing)} instances, the first is {missing[0]}. {remedy(stage)}")
    return [dataclasses.replace(i, notes={**i.notes, **notes[i.id]}) for i in instances]


def read_corpus(data: DataSettings, split: str) -> Iterable[Dialogue] | None:
    """Reads the dialogues of a split from the corpus; None if that has yet to be downloaded.

    Raises DataError if the corpus is not where `data` says, or a line of it cannot be read.
    """
    if data.name == "sample":
        return sample.load_dialogues()[split]
    if data.name == "jsonl":
        return own.read_dialogues(data.dir, split)
    archive = empathetic_dialogues.given_archive(data.dir)
    return None if archive is None else empathetic_dialogues.read_dialogues(archive, split)


def note_corpus(data: DataSettings) -> None:
    """Records the corpus as an input of a stage that depends on its contents but not on `prepare`, if it is there."""
    with contextlib.suppress(ConfigError, DataError):
        if data.name == "jsonl":
            own.find_files(data.dir)
        elif data.name == "empathetic_dialogues":
            empathetic_dialogues.given_archive(data.dir)


def has_emotions(data: DataSettings, split: str, least: int = 1) -> bool:
    """Whether the dialogues of a split with a reply have `least` different emotions.

    Always True unless the corpus is the user's own.
    """
    return data.name != "jsonl" or own.has_emotions(data.dir, split, least)


def planned_instances(run: RunContext, split: str) -> list[Instance]:
    """Returns the instances that `prepare` has written or will write; none if the corpus has yet to be downloaded."""
    if run.files.done("prepare").exists() and "prepare" not in run.redone:
        return load_instances(run.at("prepare"), split)
    data = run.plan.data
    with noting():  # the corpus is an input of `prepare` alone
        if data.name == "jsonl":  # the random draw depends on the order, which TFDS defines
            dialogues = own.load_dialogues(data.dir, beam=data.beam)[split]
        else:
            dialogues = read_corpus(data, split) or ()
        made = to_instances(dialogues, moel_compat=data.moel_compat)
    return draw_dialogues(made, data.limit)


def planned_notes(run: RunContext) -> list[str]:
    """Returns the names of the notes that stages before this one will add to the training instances."""
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
        raise ConfigError(f"config.run has no stage 'prepare' before {run.stage!r}, which reads its output.")


def check_sole(run: RunContext) -> None:
    """Raises ConfigError if an earlier stage is of the same kind as this one, whose notes have the same names."""
    kind = run.named(run.stage).kind
    if other := next((name for name in run.before() if run.named(name).kind == kind), ""):
        raise ConfigError(
            f"config.{other} and config.{run.stage} are both of kind {kind!r}, and their notes have the same names; "
            f"leave {run.stage!r} out of config.run, and set in config.{other} all that is wanted."
        )


def check_candidates(run: RunContext, index: str, least: int) -> None:
    """Raises ConfigError unless the stage `index`, named by `config.STAGE.index`, will write enough candidates.

    These are at least `least` candidates for each instance of training and validation.
    """
    settings = run.earlier("index", index, kind="index").settings
    if missing := [split for split in ("train", "validation") if split not in settings.queries]:
        raise ConfigError(
            f"config.{index}.queries lacks {', '.join(missing)}, which config.{run.stage} needs; set it to the number "
            "of instances to search, 0 for all."
        )
    if settings.candidates < least:
        raise ConfigError(
            f"config.{index}.candidates = {settings.candidates}, but config.{run.stage} takes {least} of a context; "
            "set it to at least as many."
        )


def load_candidates(run: RunContext, index: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads the positions of searched instances of a split, [n], and their candidates, [n, M] (index rows, -1 = none).

    Raises ConfigError if the index stage did not search the split.
    """
    path = run.files.stage(index) / f"candidates_{split}.npz"
    verify(path)
    if not path.exists():
        raise ConfigError(f"{path} is not there: {run.stage} needs {split!r} among config.{index}.queries.")
    with np.load(path) as arrays:
        return arrays["positions"], arrays["ids"]


class PlannedTokenizer:
    """A stand-in for a tokenizer that does not exist yet: it has its size and special ids, but encodes no texts.

    `encode` only estimates the length of a prompt's frame: one token for every four characters.
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
    """Whether a model is on this machine, or may be downloaded; a plan downloads nothing.

    Of a Hub model that was downloaded before, a plan notes the files. Raises ConfigError if a plan finds no such folder
    and it cannot be a name on the Hub.
    """
    if not run.planned or model in NAMED or expand(model).exists():
        return True
    # Imported here because it is slow and rarely needed.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(model, name) for name in ("config.json", "adapter_config.json")]
    except HFValidationError as error:
        raise ConfigError(
            f"config.{run.stage}: there is no folder {model!r}, and models on the hub are named USER/NAME or NAME. A "
            f"model is a folder, a GGUF file, a name on the hub, or {', '.join(map(repr, NAMED))}."
        ) from error
    if configs := [Path(path) for path in found if isinstance(path, str)]:
        folder = configs[0].parent  # it may hold more, for other libraries
        weights = next(filter(None, (sorted(folder.glob(pattern)) for pattern in _HUB_WEIGHTS)), [])
        note(f"the model {model!r}", folder, [*configs, *weights])
    return False


_HUB_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "flax_model*.msgpack")
"""Files of a Hub model's weights; the first that exist are read."""

_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.[gG][gG][uU][fF]")
"""Files of a model's folder that a tokenizer may be loaded from."""


def pretrained_tokenizer(settings: TokenizerSettings) -> SubwordTokenizer:
    """Loads the tokenizer named by `settings.pretrained`."""
    name = settings.pretrained
    folder = NAMED[name]() if name in NAMED else expand(name)
    if folder.exists():
        files = [path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)]
        note(f"the tokenizer {name!r}", folder, files if folder.is_dir() else None)
    return load_tokenizer(name, extra_tokens=SPECIAL_TOKENS if settings.tags else ())


def run_tokenizer(run: RunContext, *, planned: bool = False) -> Tokenizer:
    """Loads the tokenizer of `prepare`; if `planned`, the pretrained one or a stand-in of the planned size."""
    if not planned:
        verify(run.files.tokenizer)
        return load_tokenizer(run.files.tokenizer)
    settings = run.settings("prepare", PrepareSettings).tokenizer
    if settings.pretrained:
        return pretrained_tokenizer(settings)
    return PlannedTokenizer(settings.vocab_size)


def planned_vocab_size(run: RunContext) -> int | None:
    """Returns the size of the vocabulary, before `prepare` the largest; None if a plan may not fetch the tokenizer."""
    if run.files.done("prepare").exists():
        return run_tokenizer(run).vocab_size
    pretrained = run.settings("prepare", PrepareSettings).tokenizer.pretrained
    return run_tokenizer(run, planned=True).vocab_size if not pretrained or may_load(run, pretrained) else None
