"""The sources of a stage of kind "knowledge", for the stage and for whoever answers a new context."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from empax.core.run import RunContext
from empax.core.types import Instance
from empax.data.knowledge import Fact, exchanged
from empax.systems.knowledge.settings import KnowledgeSettings, SourceSettings
from empax.systems.knowledge.sources import FactSource, check_source, kept_facts, load_source


@dataclasses.dataclass(frozen=True)
class Finder:
    """Instances to facts.

    Attributes:
      sources: each with whether it is asked about people.
      shuffled: whether instances of a split exchange their facts.
    """

    sources: tuple[tuple[bool, FactSource], ...]
    shuffled: bool

    @classmethod
    def of(cls, settings: KnowledgeSettings, run: RunContext) -> Finder:
        """Loads what `settings` name."""
        found = tuple((social, load_source(source, run, social=social)) for social, source in _named(settings))
        return cls(found, settings.shuffled)

    @property
    def name(self) -> str:
        """Who makes the facts."""
        names = "; ".join(dict.fromkeys(source.name for _, source in self.sources))
        return f"{names}; exchanged between instances" if self.shuffled else names

    def __call__(self, instances: Sequence[Instance], split: str) -> tuple[list[list[Fact]], int]:
        """The facts of each instance, and how many could not be read; `split` is empty outside of the corpus."""
        columns, dropped = [], 0
        for social, source in self.sources:
            # What somebody says in a chat is kept nowhere.
            found = kept_facts(source, instances, split) if split else source.find(instances, split)
            rows, lost = [facts for facts, _ in found], sum(more for _, more in found)
            columns.append([[fact for fact in facts if fact.social == social] for facts in rows])
            dropped += lost
        rows = [list(itertools.chain(*facts)) for facts in zip(*columns, strict=True)]
        return (exchanged(rows) if self.shuffled else rows), dropped


def check_finder(settings: KnowledgeSettings, run: RunContext) -> None:
    """See `sources.check_source`."""
    for social, source in _named(settings):
        check_source(source, run, social=social)


def _named(settings: KnowledgeSettings) -> list[tuple[bool, SourceSettings]]:
    both = ((True, settings.social), (False, settings.entity))
    return [(social, source) for social, source in both if source is not None]
