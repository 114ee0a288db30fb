"""Selects the facts that the models read about a context: one about people per relation, a few about things."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data.features import plain_context
from empax.data.knowledge import SOCIAL_RELATIONS, Fact, facts_of
from empax.data.store import run_tokenizer
from empax.parts.encoder.task import Predictor
from empax.parts.knowledge.vectors import TextEncoder
from empax.systems.nec.ranker import Ranker, load_ranker
from empax.systems.nec.settings import NecSettings


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Reduces the facts of instances to the ones that models read, with the scores they were chosen by.

    Attributes:
      selector: compares facts, written as words, with the context (Eq. 6 and 7).
      ranker: ranks facts about things; None = the selector ranks them.
    """

    settings: NecSettings
    selector: TextEncoder
    ranker: Predictor[Ranker] | None

    @classmethod
    def of(cls, run: RunContext) -> Chooser:
        """Returns the chooser of a run at a stage that reads facts."""
        settings = run.shared_settings(NecSettings)
        tokenizer = None if settings.selector.pretrained else run_tokenizer(run)
        ranker = load_ranker(run, settings.ranker) if settings.ranker else None
        return cls(settings, TextEncoder.of(settings.selector, tokenizer, run.seed), ranker)

    def __call__(self, instances: Sequence[Instance]) -> list[Instance]:
        """Returns each instance with its chosen facts alone: about people, then about things, best first."""
        settings = self.settings
        people = SOCIAL_RELATIONS if settings.social else ()
        facts = [[f for f in facts_of(i) if (f.relation in people if f.social else settings.entity)] for i in instances]
        scores = self._cosines(instances, facts)
        self._rank(instances, facts, scores)
        chosen = [self._chosen(*both) for both in zip(facts, scores, strict=True)]
        return [
            dataclasses.replace(i, notes={**i.notes, "facts": [fact.row() for fact in kept]})
            for i, kept in zip(instances, chosen, strict=True)
        ]

    def _cosines(self, instances: Sequence[Instance], facts: Sequence[Sequence[Fact]]) -> list[list[float]]:
        """Returns the cosine of each fact with its context."""
        rows = np.repeat(np.arange(len(instances)), [len(found) for found in facts])
        if not len(rows):
            return [[] for _ in instances]
        contexts = self.selector([plain_context(i.context) for i in instances], progress="contexts")
        said = self.selector([fact.words() for found in facts for fact in found], progress="facts")
        cosines = np.einsum("nd,nd->n", contexts[rows], said)
        return [part.tolist() for part in np.split(cosines, np.cumsum([len(found) for found in facts])[:-1])]

    def _rank(self, instances: Sequence[Instance], facts: Sequence[Sequence[Fact]], scores: list[list[float]]) -> None:
        """Replaces the scores of facts about things by the ranker's, if there is one."""
        things = [(i, n) for i, found in enumerate(facts) for n, fact in enumerate(found) if not fact.social]
        if self.ranker is None or not things:
            return
        found = self.ranker([instances[i].context for i, _ in things], [facts[i][n] for i, n in things])
        for (i, n), score in zip(things, found, strict=True):
            scores[i][n] = float(score)

    def _chosen(self, facts: Sequence[Fact], scores: Sequence[float]) -> list[Fact]:
        order = sorted(range(len(facts)), key=lambda n: -scores[n])
        scored = [dataclasses.replace(facts[n], score=scores[n]) for n in order]
        people = {fact.relation: fact for fact in reversed(scored) if fact.social}
        things = [fact for fact in scored if not fact.social][: self.settings.entity_facts]
        return [*people.values(), *things]
