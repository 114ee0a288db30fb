"""The systems of a server: a model or a finished run, which answer several requests at once."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.paths import expand
from empax.core.types import Prediction
from empax.decoding.options import Call
from empax.decoding.sampling import Draws
from empax.interop.pretrained import most_tokens
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.serving.loading import load
from empax.serving.pairs import batches_of, buckets_of
from empax.serving.safety import Before, answer_to_danger, without_fixed
from empax.serving.session import Session, why_of
from empax.serving.streaming import Wording, in_parts, place_of_stop, room_of
from empax.serving.text_model import TextModel

T = TypeVar("T")

MOST_SOURCE_TOKENS = 512
"""A longer conversation keeps the newest turns that fit. A model without positions embeds no longer text."""

PART_TOKENS = 2
"""Number of tokens to generate before sending new text and checking for disconnected clients."""

DRAWN = ("temperature", "top_p")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for one reply.

    Attributes:
      turns: turns of the conversation, the user's newest last.
      seed: seed of sampling; None = random, or the seed of a run's recipe.
      number: index among several replies to the same turns; each is sampled separately.
      temperature: 0 = greedy decoding; None = the system's default, here and below.
      top_p: samples from the likeliest tokens whose probabilities add up to this (nucleus sampling).
      max_tokens: maximum length of the reply, including its end.
      stop: texts that end the reply, and are not part of it.
    """

    turns: tuple[str, ...]
    seed: int | None = None
    number: int = 0
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Said:
    """A reply, the numbers of tokens read and generated, and the system's explanation, if it has one.

    The end counts as a token; a fixed answer has none. `cut`: whether it was truncated at the maximum length.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cut: bool = False
    why: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Replies: TypeAlias = Iterator[tuple[int, "str | Said"]]
"""Pairs of a row and a piece of its reply, as they come, and then the whole reply, whose text the pieces begin."""


def _all_wait(row: int) -> bool:
    del row
    return True


class System(Protocol):
    """A model or run behind the server: its name in requests, and the fields of `Asked` that it supports."""

    name: str
    options: frozenset[str]
    batch_size: int

    def at_once(self, asked: Asked) -> Said | None:
        """Returns a reply that needs no model and no queue, or None; may run concurrently with `answer`."""
        ...

    def group(self, asked: Asked) -> Hashable:
        """Returns the group of a request; requests of one group may be batched.

        Raises:
          ConfigError: it cannot answer this request.
        """
        ...

    def answer(self, asked: Sequence[Asked], waits: Callable[[int], bool] = _all_wait) -> Replies:
        """Answers requests of one group, at most `batch_size`; may skip rows for which `waits` is false."""
        ...

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Returns vectors [N, D] of the texts, and their number of tokens.

        Raises:
          ConfigError: it cannot embed, or a text is too long.
        """
        ...


class ModelSystem:
    """A `TextModel`. Batches have 1, 2, 4, ... rows, which have separate seeds and are independent.

    Temperatures and lengths are inputs of the compiled program, so that they trigger no compilation.
    """

    def __init__(
        self, name: str, model: TextModel, *, batch_size: int, max_tokens: int, before: Before | None = answer_to_danger
    ):
        self.name, self.model, self.batch_size, self._before = name, model, batch_size, before
        self.options = frozenset[str]()
        if isinstance(model.model, DualEncoder):
            return
        self.options = frozenset({"temperature", "top_p", "max_tokens", "seed"})
        generator, self._source_tokens, self._positions = model.generator, MOST_SOURCE_TOKENS, most_tokens(model.model)
        if self._positions is not None:
            shared = isinstance(model.model, DecoderOnly)
            self._source_tokens = min(MOST_SOURCE_TOKENS, self._positions // 2 if shared else self._positions)
            max_tokens = min(max_tokens, self._positions // 2)
        self.max_tokens = max_tokens
        self._usual = min(generator.reply_call({}).settings.max_tokens, max_tokens)
        room = {"max_new_tokens": max_tokens}
        self._calls: dict[str, Call] = {
            "own": generator.call(room),
            "likeliest": generator.call({**room, "method": "greedy"}),
            "drawn": generator.call({**room, "method": "sample", "num_samples": 1}),  # also instead of beams
        }

    def _way(self, asked: Asked) -> str:
        if asked.temperature == 0:
            return "likeliest"
        return "own" if asked.temperature is None and asked.top_p is None else "drawn"

    def _examples(self, asked: Sequence[Asked]) -> Any:
        # Only the conversation is truncated, and there is room for every answer.
        return self.model.generator.examples(
            [(without_fixed(a.turns), "") for a in asked], lengths={"max_context_tokens": self._source_tokens}
        )

    def group(self, asked: Asked) -> Hashable:
        if not self.options:
            raise ConfigError("this system is an encoder and generates no text; it has /v1/embeddings.")
        if asked.max_tokens is not None and not 1 <= asked.max_tokens <= self.max_tokens:
            raise ConfigError(f"max_tokens = {asked.max_tokens} must be from 1 to {self.max_tokens}.")
        length = buckets_of(self._examples([asked]), most=self._positions, least=_LEAST_SOURCE)[-1]
        return self._way(asked), length, room_of(self._most(asked))

    def at_once(self, asked: Asked) -> Said | None:
        return _fixed(self._before, asked)

    def answer(self, asked: Sequence[Asked], waits: Callable[[int], bool] = _all_wait) -> Replies:
        model, call = self.model.generator, self._calls[self._way(asked[0])]
        settings = call.settings
        usual = settings.temperature, settings.top_p
        drawn = settings.method == "sample"
        if drawn:
            settings = dataclasses.replace(settings, temperature=1.0, top_p=1.0)
        task = model.task(settings, eos_id=call.eos_id, start_id=call.start_id, replies=True)
        ends, examples = task.decoder.eos_ids, self._examples(asked)
        [(rows, batch)] = batches_of(examples, self.batch_size, most=self._positions, least=_LEAST_SOURCE)
        each = [asked[row] if row >= 0 else _FILLER for row in rows]
        most = np.array([self._most(a) for a in each], np.int32)
        fewest = np.minimum(call.limits(examples.lengths[rows, 0])[0], most)
        rng = Draws(jnp.stack([_key(a) for a in each]))
        if drawn:
            of = [[_or(getattr(a, name), own) for a in each] for name, own in zip(DRAWN, usual, strict=True)]
            rng = Draws(rng.keys, *(jnp.array(values, jnp.float32) for values in of))
        forced = settings.end_at_limit
        wordings = [Wording(model, a.turns[-1], ends, int(n), a.stop, forced) for a, n in zip(each, most, strict=True)]

        def gone() -> np.ndarray:
            return np.array([w.over or row < 0 or not waits(row) for w, row in zip(wordings, rows, strict=True)])

        for found in in_parts(task, model.params, batch, rng, (fewest, most), gone, tokens=PART_TOKENS):
            for row, wording, *progress in zip(rows.tolist(), wordings, *found, strict=True):
                if row < 0 or wording.over or not waits(row):
                    continue
                if new := wording.read(*progress):
                    yield row, new
                if wording.over:
                    read = int(examples.lengths[row, 0])
                    yield row, Said(wording.text, read, wording.count, cut=wording.cut)

    def _most(self, asked: Asked) -> int:
        return asked.max_tokens or self._usual

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        lengths = [len(ids) for ids in self.model.ids_to_embed(texts)]
        # A T5 reads any length, in memory that grows with its square.
        if max(lengths) > MOST_SOURCE_TOKENS and most_tokens(self.model.model) is None:
            raise ConfigError(f"a text has {max(lengths)} tokens; {MOST_SOURCE_TOKENS} are allowed.")
        return self.model.embed(texts), sum(lengths)


class RunSystem:
    """A finished run: decodes as in its recipe, and explains its replies; batches as in `ModelSystem`."""

    options = frozenset({"seed"})

    def __init__(self, name: str, session: Session, *, batch_size: int):
        self.name, self._session, self.batch_size = name, session, batch_size

    def group(self, asked: Asked) -> Hashable:
        for option in ("max_tokens", *DRAWN):
            if getattr(asked, option) is not None:
                raise ConfigError(f"{option}: this system decodes as its recipe says.")
        return None

    def at_once(self, asked: Asked) -> Said | None:
        return _fixed(self._session.before, asked)

    def answer(self, asked: Sequence[Asked], waits: Callable[[int], bool] = _all_wait) -> Replies:
        rows = [i for i in range(len(asked)) if waits(i)]
        session, each = dataclasses.replace(self._session, before=None), [asked[i] for i in rows]
        seeds = [_seed(_or(a.seed, session.seed), a.number) for a in each]
        found = session.replies([list(a.turns) for a in each], seeds=seeds)
        yield from ((i, self._said(a, one)) for i, a, one in zip(rows, each, found, strict=True))

    def _said(self, asked: Asked, found: Prediction) -> Said:
        tokenizer = getattr(self._session.answerer, "tokenizer", None)
        encode = tokenizer.encode if tokenizer else str.split
        place = place_of_stop(found.response, asked.stop)
        text, read = found.response[:place], sum(len(encode(turn)) for turn in asked.turns)
        cut = place is None and "cut" in found.notes
        return Said(text, read, len(encode(text)) + (place is None and not cut), cut=cut, why=why_of(found))

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        raise ConfigError("this system is a run that answers, and embeds no texts.")


def is_run(name: str) -> bool:
    """Whether `name` is the work directory of a run, rather than a model."""
    path = expand(name)
    return path.is_dir() and WorkDir(path).provenance.exists()  # a model has a config.json, too


def name_of(name: str) -> str:
    """Returns the name of a model or run in requests: its last path component."""
    path = expand(name)
    return path.resolve().name if path.exists() else Path(name).name


def load_system(name: str, *, batch_size: int, max_tokens: int, before: Before | None = answer_to_danger) -> System:
    """Loads a finished run from its work directory, or any model that `load` accepts; named as by `name_of`.

    Raises:
      ConfigError: neither exists, or the run has not finished.
    """
    if is_run(name):
        return RunSystem(name_of(name), Session.load(expand(name), before=before), batch_size=batch_size)
    return ModelSystem(name_of(name), load(name), batch_size=batch_size, max_tokens=max_tokens, before=before)


_LEAST_SOURCE = 64
"""Shorter sources are padded to this many tokens, so that most requests can be batched and share one program."""

_FILLER = Asked(("",), seed=0, max_tokens=1)
"""A padding row of a batch."""


def _fixed(before: Before | None, asked: Asked) -> Said | None:
    text = before(asked.turns[-1].strip()) if before else None
    return None if text is None else Said(text, 0, 0, why={"fixed": True})


def _key(asked: Asked) -> jax.Array:
    """Returns the key of a row's sampling, from its seed or, without one, random."""
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    return jax.random.fold_in(jax.random.key(seed), asked.number)


def _seed(seed: int, number: int) -> int:
    """Returns the seed of a request's choice `number`, which differs from the seeds of other requests."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1) if number else seed


def _or(value: T | None, usual: T) -> T:
    return usual if value is None else value
