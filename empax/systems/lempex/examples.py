"""LEMPEx' examples: turns with their speakers, responses as exemplars, and the inputs of its judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.protocols import Tokenizer
from empax.core.types import LEVELS, MECHANISMS, Instance
from empax.data import features
from empax.data.exemplars import ContextExamples, Corpus, LabelledBatch
from empax.data.sources import LayoutSettings, Row, Text
from empax.evaluation.empathy import sentiment
from empax.parts.attributes.classifier import frame

NOBODY, SPEAKER, LISTENER = range(3)
"""Rows of the speaker embedding: frame and padding, the speaker, the listener."""


@flax.struct.dataclass
class LempexBatch(LabelledBatch):
    """Contexts with speakers and exemplars; if the response is judged, also the inputs of the judges.

    Attributes:
      speaker: row of the speaker embedding for each source token.
      exemplar: retrieved responses; None = no exemplars.
      other: exemplars of another context, to measure the value of the own ones.
      judged: context and gold response as the classifiers read them; the response starts at `judged_start`.
      reply: the gold response as the regressor reads it; it starts at 1.
      levels: levels of the mechanisms in the gold response, -1 = unknown.
      compound: sentiment of the gold response.
    """

    speaker: Int[Array, "B S"]
    exemplar: Int[Array, "B K P"] | None = None
    exemplar_mask: Bool[Array, "B K P"] | None = None
    other: Int[Array, "B K P"] | None = None
    other_mask: Bool[Array, "B K P"] | None = None
    judged: Int[Array, "B J"] | None = None
    judged_mask: Bool[Array, "B J"] | None = None
    judged_start: Int[Array, " B"] | None = None
    reply: Int[Array, "B R"] | None = None
    reply_mask: Bool[Array, "B R"] | None = None
    levels: Int[Array, "B C"] | None = None
    compound: Float[Array, " B"] | None = None


@dataclasses.dataclass(frozen=True)
class TurnForm:
    """All turns concatenated, in the tokenizer's own frame; exemplars are responses alone.

    Departure: a context that is too long keeps its newest tokens; the released code keeps the oldest.
    """

    tokenizer: Tokenizer
    layout: LayoutSettings

    @property
    def apart(self) -> bool:
        return False  # exemplars are not rows

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        return [Text([], ids) for ids, _ in self.spoken(instances)]

    def spoken(self, instances: Sequence[Instance]) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each context with its frame, and the speaker embedding's row of each id."""
        before, behind = self.tokenizer.framing
        room = self.layout.max_context_tokens - len(before) - len(behind)
        turns = list(dict.fromkeys(turn for instance in instances for turn in instance.context))
        known = dict(zip(turns, self.tokenizer.encode_batch(turns), strict=True))
        rows = []
        for instance in instances:
            ids: list[int] = []
            speakers: list[int] = []
            for distance, turn in zip(range(len(instance.context) - 1, -1, -1), instance.context, strict=True):
                ids += known[turn]
                speakers += [LISTENER if distance % 2 else SPEAKER] * len(known[turn])
            cut = max(len(ids) - room, 0)
            framed = [*before, *ids[cut:], *behind]
            rows.append((framed, [*[NOBODY] * len(before), *speakers[cut:], *[NOBODY] * len(behind)]))
        return rows

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        before, behind = self.tokenizer.framing
        room = self.layout.max_passage_tokens - len(before) - len(behind)
        answers = self.tokenizer.encode_batch([instance.response for instance in instances])
        return [Text([], [*before, *answer[:room], *behind]) for answer in answers]

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        del passages  # they have their own columns
        return np.array([text.size for text in contexts])

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        # A text longer than its bucket keeps its newest tokens, here and in `LempexExamples`.
        made = [row[0].ids[-length:] if row and row[0] else [] for row in rows]
        return features.pad(made, length, self.tokenizer.pad_id)


def judged_length(source: int, target: int, most: int) -> int:
    """Returns the padded length of classifiers' rows: source, target and frame, at most `most`; it takes few values."""
    return min(max(source + target + 3, 2 * target), most)


class LempexExamples(ContextExamples):
    """Examples of LEMPEx' generator.

    `candidates` are the exemplars of each of N instances, [N, K] rows of the `corpus`, -1 = none; without them, the
    generator reads none. With `others`, batches also have the exemplars of the instance N / 2 rows on. For the
    empathetic losses, `judged` is the maximum tokens of context and response that a classifier reads, and the notes
    have `response_attributes`; 0 = batches have no labels.
    """

    form: TurnForm

    def __init__(
        self,
        instances: Sequence[Instance],
        form: TurnForm,
        *,
        corpus: Corpus | None = None,
        candidates: np.ndarray | None = None,
        judged: int = 0,
        others: bool = False,
    ):
        super().__init__(instances, form, corpus=corpus, candidates=candidates)
        self.speakers = [speakers for _, speakers in form.spoken(instances)]
        self.judged, self.others = judged, others
        if judged:
            levels = [instance.notes.get("response_attributes", {}) for instance in instances]
            order = {level: i for i, level in enumerate(LEVELS)}
            self.levels = np.array([[order.get(row.get(name), -1) for name in MECHANISMS] for row in levels], np.int32)
            self.compounds = np.array([sentiment(instance.response) for instance in instances], np.float32)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> LempexBatch:
        rows = [int(i) for i in indices]
        arrays = self.context_columns(rows, length)
        speakers = [self.speakers[i][-length:] if i >= 0 else [] for i in rows]
        arrays["speaker"] = features.pad(speakers, length, NOBODY)[0]
        if self.corpus is not None:
            arrays["exemplar"], arrays["exemplar_mask"] = self._exemplars(rows)
            if self.others:
                half = len(self) // 2
                others = [(i + half) % len(self) if i >= 0 else -1 for i in rows]
                arrays["other"], arrays["other_mask"] = self._exemplars(others)
        if self.judged:
            arrays |= self._judged(rows, length, arrays["target"].shape[1])
        return LempexBatch(**arrays)

    def _exemplars(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        assert self.corpus is not None
        chosen = np.stack([self.candidates[i] if i >= 0 else np.full_like(self.candidates[0], -1) for i in rows])
        texts = [self.corpus.passages[row].ids if row >= 0 else [] for row in chosen.ravel()]
        ids, mask = features.pad(texts, self.form.layout.max_passage_tokens, self.pad_id)
        return ids.reshape(*chosen.shape, -1), mask.reshape(*chosen.shape, -1)

    def _judged(self, rows: Sequence[int], source: int, target: int) -> dict[str, Any]:
        """Returns the inputs and labels of the judges."""
        tokenizer = self.form.tokenizer
        before, behind = tokenizer.framing
        length = judged_length(source, target, self.judged)

        def read(i: int) -> tuple[list[int], int, list[int]]:
            if i < 0:
                return [], 0, []
            context, answer = self.contexts[i].ids, self.targets[i][:-1]
            row, start = frame(tokenizer, context[len(before) : len(context) - len(behind)], answer, length)
            return row, start, [tokenizer.cls_id, *answer, tokenizer.sep_id]

        judged, starts, replies = zip(*map(read, rows), strict=True)
        picked = np.maximum(rows, 0)
        arrays: dict[str, Any] = {"levels": self.levels[picked], "compound": self.compounds[picked]}
        arrays["judged_start"] = np.array(starts, np.int32)
        arrays["judged"], arrays["judged_mask"] = features.pad(judged, length, self.pad_id)
        arrays["reply"], arrays["reply_mask"] = features.pad(replies, target + 1, self.pad_id)
        return arrays
