"""Stage "prepare": converts the corpus to instances by split, and trains the tokenizer of a generator from scratch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from empax.core.files import DataError, hash_file, write_json, write_jsonl
from empax.core.settings import DataSettings
from empax.core.system import RunContext
from empax.core.types import Dialogue, Instance
from empax.data import empathetic_dialogues, own, sample
from empax.data.batches import DRAWN, draw_dialogues
from empax.data.bpe import train_bpe
from empax.data.dialogues import instance_to_row, to_instances
from empax.data.features import SPECIAL_TOKENS
from empax.data.store import PrepareSettings, TokenizerSettings, may_load, pretrained_tokenizer, read_corpus
from empax.data.words import train_words

log = logging.getLogger("empax")

Settings = PrepareSettings


def load_dialogues(settings: DataSettings) -> tuple[Mapping[str, Sequence[Dialogue]], str]:
    """Loads the dialogues by split, and hashes the files that they come from."""
    if settings.name == "sample":
        return sample.load_dialogues(), hash_file(sample.PATH)
    if settings.name == "jsonl":
        return own.load_dialogues(settings.dir, beam=settings.beam), own.files_hash(settings.dir)
    folder = settings.dir or None
    return empathetic_dialogues.load_dialogues(folder), empathetic_dialogues.archive_hash(folder)


def check(settings: Settings, run: RunContext) -> None:
    """Checks that the corpus and the tokenizer are available.

    Raises:
      DataError: the corpus is missing, its first lines are unreadable, or a split has no reply.
      ConfigError: the tokenizer does not exist, or its vocabulary is too small.
    """
    data = run.plan.data
    if data.name == "jsonl":
        own.check_files(data.dir)
        own.check_beam(data.beam)
    _check_replies(data)
    if not settings.tokenizer.pretrained:
        _tokenizer(settings.tokenizer, [])
    elif may_load(run, settings.tokenizer.pretrained):
        pretrained_tokenizer(settings.tokenizer)


def _check_replies(data: DataSettings) -> None:
    """Raises DataError if a split of a locally available corpus makes no instance."""
    for split in own.SPLITS:
        dialogues = read_corpus(data, split)
        if dialogues is None:
            return
        _check_some(any(len(dialogue.utterances) > 1 for dialogue in dialogues), split, data)


def _check_some(found: object, split: str, data: DataSettings) -> None:
    """Raises DataError if nothing was found in a split."""
    where = f" = {data.dir!r}" if data.dir else ""
    if not found:
        raise DataError(
            f"config.data.dir{where}: no dialogue of the split {split!r} has a reply, so there is nothing to learn or "
            "answer; add some with two turns or more."
        )


def run(settings: Settings, run: RunContext) -> None:
    data = run.plan.data
    splits, source_hash = load_dialogues(data)
    counts: dict[str, Any] = {"source_hash": source_hash}
    instances: dict[str, list[Instance]] = {}
    for split, dialogues in splits.items():
        made = to_instances(dialogues, moel_compat=data.moel_compat)
        instances[split] = draw_dialogues(made, data.limit)
        counts[split] = {"dialogues": len(dialogues), "instances": len(instances[split])}
        if len(instances[split]) < len(made):
            counts[split] |= {"out_of": len(made), "chosen": DRAWN}
        log.info("%s: %d dialogues, %d instances", split, len(dialogues), len(instances[split]))
        _check_some(instances[split], split, data)
        write_jsonl(run.files.instances(split), map(instance_to_row, instances[split]))
    if settings.tokenizer.kind == "words":
        names = settings.tokenizer.splits_in_vocabulary
        kept = {i.dialogue_id for name in names for i in instances[name]} if data.limit else None
        texts = [text for name in names for text in _said(splits[name], kept)]
    else:  # every turn once
        texts = list(dict.fromkeys(turn for i in instances["train"] for turn in (*i.context, i.response)))
    _tokenizer(settings.tokenizer, texts).save(run.files.tokenizer)
    write_json(run.files.stage("prepare") / "counts.json", counts)


def _said(dialogues: Sequence[Dialogue], kept: Collection[str] | None) -> list[str]:
    """Lists every turn and situation, with repetitions, of the dialogues with the ids `kept`; None = all dialogues."""
    said = (d for d in dialogues if kept is None or d.id in kept)
    return [text for d in said for text in (*(u.text for u in d.utterances), d.situation)]


def _tokenizer(settings: TokenizerSettings, texts: list[str]) -> Any:
    if settings.pretrained:
        return pretrained_tokenizer(settings)
    if settings.kind == "words":
        options = {"min_count": settings.min_count, "style": settings.style, "vocab_size": settings.vocab_size}
        return train_words(texts, special_tokens=SPECIAL_TOKENS, **options)  # pyright: ignore[reportArgumentType]
    return train_bpe(texts, vocab_size=settings.vocab_size, lowercase=settings.lowercase, special_tokens=SPECIAL_TOKENS)
