"""NEC's inputs: the context followed by facts about things, separate facts about people, and candidates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.types import EMOTIONS, Instance
from empax.data import features
from empax.data.exemplars import ContextExamples, LabelledBatch, emotion_ids
from empax.data.knowledge import SOCIAL_RELATIONS, Fact, facts_of
from empax.data.sources import Row, TaggedForm, Text
from empax.data.tokenizers import SEPARATOR
from empax.evaluation.text import clauses

QUERY = "query:"
"""Prefix of every context. Source: NEC's code."""
FACTS = "The following knowledge facts are highly relevant to the left query:"
"""Prompt before the facts. Source: NEC, P_r of Eq. 3."""


@flax.struct.dataclass
class NecBatch(LabelledBatch):
    """A batch with M facts about people for each row, and with candidate responses.

    `different` are responses to dialogues of other emotions, `frequent` frequent clauses, `own` outputs of the current
    model; None = no such candidates. Like targets, candidates that were not truncated end with the end-of-sequence id;
    none has a start id.
    """

    facts: Int[Array, "B M F"] | None = None
    facts_mask: Bool[Array, "B M F"] | None = None
    different: Int[Array, "B N T"] | None = None
    different_mask: Bool[Array, "B N T"] | None = None
    frequent: Int[Array, "B J T"] | None = None
    frequent_mask: Bool[Array, "B J T"] | None = None
    own: Int[Array, "B K U"] | None = None
    own_mask: Bool[Array, "B K U"] | None = None


@dataclasses.dataclass(frozen=True)
class FactForm(TaggedForm):
    """`query: context <sep> prompt facts`, with the facts of an instance's notes concatenated (Eq. 3).

    If a row is too long, the context loses its oldest ids. Facts are never cut: the best that fit into
    `max_passage_tokens` are read. An instance without facts about things has the query alone.
    """

    facts_as: Literal["sentences", "triples"] = dataclasses.field(kw_only=True)

    @property
    def apart(self) -> bool:
        return False

    @property
    def beside(self) -> int:
        return len(self.query) + super().beside + self.layout.max_passage_tokens

    @property
    def query(self) -> list[int]:
        return self.tokenizer.encode(QUERY)

    @property
    def prompt(self) -> list[int]:
        return [self.tokenizer.token_id(SEPARATOR), *self.tokenizer.encode(FACTS)]

    def read(self, instance: Instance) -> list[tuple[Fact, list[int]]]:
        """Returns the facts about things that fit behind the prompt, best first, with their ids."""
        left, found = self.layout.max_passage_tokens - len(self.prompt), []
        for fact in facts_of(instance):
            if fact.social:
                continue
            ids = self.tokenizer.encode(fact.triple() if self.facts_as == "triples" else fact.words())
            if (size := len(ids) + bool(found)) <= left:
                found.append((fact, ids))
                left -= size
        return found

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        """Returns each context with the prompt and facts that follow it as its attributes."""
        rows, separator = super().contexts(instances), self.tokenizer.token_id(SEPARATOR)
        made = []
        for instance, row in zip(instances, rows, strict=True):
            behind: list[int] = []
            for _, ids in self.read(instance):
                behind += [*([separator] if behind else self.prompt), *ids]
            made.append(Text(behind, row.ids))
        return made

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        del passages  # not read
        return np.array([text.size for text in contexts]) + len(self.query) + sum(map(len, self.frame))

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        made = [self._framed(row[0], length) if row and row[0] else [] for row in rows]
        return features.pad(made, length, self.tokenizer.pad_id)

    def _framed(self, text: Text, length: int) -> list[int]:
        query, (before, behind) = self.query, self.frame
        room = length - len(before) - len(behind) - len(query) - len(text.attributes)
        if room < 2:
            raise ConfigError(
                f"a bucket of {length} leaves {room} tokens for a context beside {len(text.attributes)} of facts; make "
                "the last bucket longer, or max_passage_tokens smaller."
            )
        context = features.keep_newest(text.ids, room, self.turns)
        return [*before, *query, *context, *text.attributes, *behind]


def social_facts(instance: Instance) -> list[Fact | None]:
    """Returns the best fact about people of each relation in SOCIAL_RELATIONS; None = no fact."""
    found: dict[str, Fact] = {}
    for fact in facts_of(instance):
        found.setdefault(fact.relation, fact)
    return [found.get(name) for name in SOCIAL_RELATIONS]


def facts_read(form: TaggedForm, instance: Instance) -> list[Fact]:
    """Returns those of an instance's chosen facts that have a place in a batch."""
    things = [fact for fact, _ in form.read(instance)] if isinstance(form, FactForm) else []
    return [*(fact for fact in social_facts(instance) if fact), *things]


def frequent_clauses(responses: Sequence[str], count: int) -> list[str]:
    """Returns the most frequent clauses of two words or more; ties go to the first.

    A clause is the text between commas, full stops, question and exclamation marks. Source: NEC's code.
    """
    counted = Counter(clause for response in responses for clause in clauses(response) if len(clause.split()) > 1)
    return [clause for clause, _ in counted.most_common(count)]


@dataclasses.dataclass(frozen=True)
class Negatives:
    """Responses of the training split to draw candidates from.

    Attributes:
      targets: all responses, as targets.
      by_emotion: rows of `targets` for each emotion, in the order of EMOTIONS.
      frequent: the most frequent clauses, as targets; the same for every example.
      different: number of responses of other emotions per example.
    """

    targets: Sequence[list[int]]
    by_emotion: Sequence[np.ndarray]
    frequent: Sequence[list[int]]
    different: int

    @classmethod
    def of(
        cls, instances: Sequence[Instance], tokenizer: Tokenizer, max_tokens: int, *, different: int, frequent: int
    ) -> Negatives:
        """Collects the negatives of the training split; raises ConfigError if too few emotions are known."""

        def targets(texts: Sequence[str]) -> list[list[int]]:
            rows = tokenizer.encode_batch(list(texts))
            return [features.render_target(ids, eos_id=tokenizer.eos_id, max_tokens=max_tokens) for ids in rows]

        emotions = emotion_ids(instances)
        by_emotion = [np.flatnonzero(emotions == e) for e in range(len(EMOTIONS))]
        if different and sum(map(bool, map(len, by_emotion))) < 2:
            raise ConfigError(
                "the training split has dialogues of fewer than two emotions, so no response has another one; set "
                "contrast.different = 0."
            )
        responses = [i.response for i in instances]
        return cls(targets(responses), by_emotion, targets(frequent_clauses(responses, frequent)), different)

    def draw(self, emotion: int, rng: np.random.Generator) -> list[list[int]]:
        """Draws responses to dialogues of other emotions: first the emotion, then the response (NEC's code).

        They are empty if the example's own emotion is unknown (-1): any emotion could be its own.
        """
        if emotion < 0:
            return [[]] * self.different
        others = [e for e, rows in enumerate(self.by_emotion) if len(rows) and e != emotion]
        drawn = rng.choice(others, size=self.different)
        return [self.targets[int(rng.choice(self.by_emotion[e]))] for e in drawn]


class NecExamples(ContextExamples):
    """Examples of instances whose notes have the chosen facts; with `negatives`, also candidate responses.

    A fact about people has at most `social_tokens` tokens; 0 = such facts are not read.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        form: TaggedForm,
        *,
        social_tokens: int = 0,
        negatives: Negatives | None = None,
    ):
        super().__init__(instances, form)
        self.social_tokens, self.negatives = social_tokens, negatives
        self.social: list[list[int]] = []
        if social_tokens:
            words = [fact.words() if fact else "" for i in instances for fact in social_facts(i)]
            self.social = [ids[:social_tokens] for ids in form.tokenizer.encode_batch(words)]

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> NecBatch:
        rows = [int(i) for i in indices]
        arrays = self.context_columns(rows, length)
        if self.social_tokens:
            each = len(SOCIAL_RELATIONS)
            texts = [self.social[i * each + m] if i >= 0 else [] for i in rows for m in range(each)]
            arrays |= self._columns("facts", texts, len(rows), self.social_tokens)
        if self.negatives is not None:
            arrays |= self._candidates(rows, self.negatives, rng)
        return NecBatch(**arrays)

    def _candidates(self, rows: Sequence[int], negatives: Negatives, rng: np.random.Generator) -> dict[str, Any]:
        emotions = [int(self.emotions[i]) if i >= 0 else -1 for i in rows]
        texts = {
            "different": [ids for emotion in emotions for ids in negatives.draw(emotion, rng)],
            "frequent": [ids for _ in rows for ids in negatives.frequent],
        }
        width, found = self.form.layout.max_target_tokens, {}
        for name in filter(texts.get, texts):
            found |= self._columns(name, texts[name], len(rows), width)
        return found

    def _columns(self, name: str, texts: Sequence[list[int]], rows: int, width: int) -> dict[str, Any]:
        ids, mask = features.pad(texts, width, self.pad_id)
        return {name: ids.reshape(rows, -1, width), f"{name}_mask": mask.reshape(rows, -1, width)}
