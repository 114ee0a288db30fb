"""Streaming of answers: decoding in parts, and text that is never revised once sent."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from empax.core.types import Batch, Params
from empax.decoding.hypotheses import Limits, Progress
from empax.decoding.sampling import Draws
from empax.parts.generator.task import Generator
from empax.serving.answering import TextGenerator, answers_of

LEAST_ROOM = 64
"""Size of the smallest cache in tokens; larger ones are powers of two times this."""


def room_of(most_tokens: int) -> int:
    """Returns the cache size for this many tokens."""
    return max(LEAST_ROOM, 1 << (most_tokens - 1).bit_length())


def in_parts(
    task: Generator,
    params: Params,
    batch: Batch,
    rng: Draws,
    limits: tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]],
    gone: Callable[[], Bool[np.ndarray, " B"]],
    *,
    tokens: int,
) -> Iterator[Progress]:
    """Yields the best answers so far, as NumPy arrays, after every `tokens` tokens until all have ended or are `gone`.

    The answers do not depend on the number of parts. A method that draws beams or re-ranks hypotheses knows its answer
    only at the end, and yields one part.
    """
    settings = task.decoder.settings
    if settings.draw_beams or settings.rerank or (settings.method == "sample" and settings.num_samples > 1):
        found: Any = answers_of(task, {"model": params}, batch, rng, limits, ~gone())[:, 0]
        all_of_it: Any = np.full(len(found), found.shape[1])
        yield Progress(found, all_of_it, all_of_it > 0)
        return
    room = max(room_of(int(limits[1].max())), settings.min_tokens)
    decoder = dataclasses.replace(task.decoder, settings=dataclasses.replace(settings, max_tokens=room))
    task, until = dataclasses.replace(task, decoder=decoder), 0
    given: tuple[Any, ...] = (np.asarray(batch.source), np.asarray(batch.source_mask), rng, limits)
    state, rows = _begin(task, params, *given[:3]), np.arange(len(batch.source))
    whole: Any = None
    while True:
        until += tokens
        left = gone()
        state, progress = _go_on(task, params, state, *given, until, left[rows])
        progress = jax.device_get(progress)
        if whole is None:
            whole = jax.tree.map(np.array, progress)
        for of_all, of_these in zip(whole, progress, strict=True):
            of_all[rows] = of_these
        yield whole
        live = ~(progress.ended | left[rows])
        if not live.any():
            return
        size = 1 << (int(live.sum()) - 1).bit_length()
        if size < len(rows):  # drop rows that have ended
            kept = np.argsort(~live, kind="stable")[:size]
            state, rows = _take(task, state, kept), rows[kept]
            given = jax.tree.map(operator.itemgetter(kept), given)


@functools.partial(jax.jit, static_argnums=0)
def _begin(task: Generator, params: Params, source: Any, mask: Any, rng: Draws) -> Any:
    decoder, model = task.decoder, task.model
    states = model.apply({"params": params}, source, mask, method="encode", deterministic=True)
    looked_at = decoder.looked_at(source, mask)
    search = decoder.search(model, params, rng, decoder.start_of(states), len(mask), **looked_at)
    return search.begin(decoder.cache(model, params, states, mask))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _go_on(
    task: Generator, params: Params, state: Any, source: Any, mask: Any, rng: Draws, limits: Limits,
    until: int, gone: Any,
) -> tuple[Any, Progress]:  # fmt: skip
    looked_at = task.decoder.looked_at(source, mask)
    search = task.decoder.search(task.model, params, rng, 0, len(gone), limits=limits, **looked_at)
    state = search.go_on(search.without(state, gone), until)
    return state, search.progress(state)


@functools.partial(jax.jit, static_argnums=0)
def _take(task: Generator, state: Any, rows: Int[jax.Array, " R"]) -> Any:
    return task.decoder.search(task.model, {}, jax.random.key(0), 0, len(rows)).take(state, rows)


@dataclasses.dataclass
class Wording:
    """The text of one answer while it is generated.

    Attributes:
      turn: the turn that it answers.
      ends: ids that end it.
      most: its maximum number of tokens.
      stop: texts that end it, and are not part of it.
      forced: whether the search forces an end as token number `most`, which then truncates it.
      text: the part of the answer that can no longer change; at the end, all of it.
      count: its number of tokens, including the end.
      over: whether it is complete.
      cut: whether it was truncated at its maximum length.
    """

    generator: TextGenerator
    turn: str
    ends: Sequence[int]
    most: int
    stop: Sequence[str] = ()
    forced: bool = False
    text: str = ""
    count: int = 0
    over: bool = False
    cut: bool = False

    def read(self, tokens: Int[np.ndarray, " T"], settled: int, ended: bool) -> str:
        """Returns the new part of the text, given the number of `settled` tokens, or that the answer has `ended`."""
        ids = tokens[: self.most if ended else min(settled, self.most)].tolist()
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        self.over = ended or end is not None
        self.cut = self.over and (end is None or (self.forced and end == self.most - 1))
        ids = ids if end is None else ids[: end + 1]
        self.count, found = len(ids), self._whole(ids) if self.over else self._certain(ids)
        if place_of_stop(found, self.stop) is not None:
            # Of several stops, the one completed by the earliest token, regardless of how many tokens arrive at once.
            self.over, self.cut = True, False
            texts = map(self._whole, (ids[:n] for n in range(1, len(ids) + 1)))
            places = ((n, text, place_of_stop(text, self.stop)) for n, text in enumerate(texts, start=1))
            self.count, found = next((n, text[:place]) for n, text, place in places if place is not None)
        elif not self.over:
            pairs = ((stop, n) for stop in self.stop for n in range(1, min(len(stop), len(found) + 1)))
            begun = [n for stop, n in pairs if found.endswith(stop[:n])]
            found = found[: len(found) - max(begun, default=0)]
        new = found.removeprefix(self.text) if found.startswith(self.text) else ""
        self.text = found if self.over else self.text + new
        return new

    def _whole(self, ids: list[int]) -> str:
        return self.generator.said(self.turn, ids).strip()

    def _certain(self, ids: list[int]) -> str:
        """Returns the text of the ids, without the part that later ids may change."""
        tokenizer, kept = self.generator.tokenizer, list(ids)
        while kept and (tokenizer.backend.id_to_token(kept[-1]) or "").startswith("<0x"):
            kept.pop()  # a byte of a character that the next token may complete
        text = self.generator.said(self.turn, kept).lstrip().rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        # The clean-up may join a blank and the text after it with later text.
        return text[: max(text.rfind(" "), 0)] if tokenizer.cleans_up else text


def place_of_stop(text: str, stops: Sequence[str]) -> int | None:
    """Returns the position of the first of `stops` in the text; None = absent."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
