"""The sources of a stage of kind "knowledge", for the stage and for answering new contexts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from empax.core.config import ConfigError
from empax.core.system import RunContext, Stage
from empax.core.types import Instance
from empax.data.knowledge import Fact, exchanged
from empax.parts.knowledge.settings import KnowledgeSettings, SourceSettings
from empax.parts.knowledge.sources import FactSource, check_source, kept_facts, load_source


@dataclasses.dataclass(frozen=True)
class Finder:
    """Finds the facts of instances.

    Attributes:
      sources: the sources, each with whether it is queried about people.
      shuffled: whether the dialogues of a split exchange the tails of their facts.
    """

    sources: tuple[tuple[bool, FactSource], ...]
    shuffled: bool

    @classmethod
    def of(cls, settings: KnowledgeSettings, run: RunContext) -> Finder:
        """Loads the sources that `settings` name."""
        found = tuple((social, load_source(source, run, social=social)) for social, source in _named(settings))
        return cls(found, settings.shuffled)

    @property
    def name(self) -> str:
        """The names of the sources."""
        names = "; ".join(dict.fromkeys(source.name for _, source in self.sources))
        return f"{names}; tails exchanged between dialogues" if self.shuffled else names

    def __call__(self, instances: Sequence[Instance], split: str) -> tuple[list[list[Fact]], int]:
        """Returns the facts of each instance, and how many could not be parsed; `split` is empty outside the corpus."""
        columns, dropped = [], 0
        for social, source in self.sources:
            # Facts about a chat are not stored.
            found = kept_facts(source, instances, split) if split else source.find(instances, split)
            rows, lost = [facts for facts, _ in found], sum(more for _, more in found)
            columns.append([[fact for fact in facts if fact.social == social] for facts in rows])
            dropped += lost
        rows = [list(itertools.chain(*facts)) for facts in zip(*columns, strict=True)]
        return (exchanged(instances, rows) if self.shuffled else rows), dropped


def check_finder(settings: KnowledgeSettings, run: RunContext) -> None:
    """Checks all sources; see `sources.check_source`."""
    for social, source in _named(settings):
        check_source(source, run, social=social)


def _named(settings: KnowledgeSettings) -> list[tuple[bool, SourceSettings]]:
    both = ((True, settings.social), (False, settings.entity))
    return [(social, source) for social, source in both if source is not None]


def with_facts(load: Callable[[], Finder | None], instances: Sequence[Instance]) -> list[Instance]:
    """Returns the instances; new ones (in chat) get facts that are found now, if `load` returns a finder."""
    new = [i for i in instances if "facts" not in i.notes]
    if not new or (finder := load()) is None:
        return list(instances)
    found = iter(finder(new, "")[0])  # by their order: in chat they share an id
    return [
        i if "facts" in i.notes else dataclasses.replace(i, notes={**i.notes, "facts": [f.row() for f in next(found)]})
        for i in instances
    ]


def find_finder(run: RunContext) -> Finder | None:
    """Returns the finder of the run's "knowledge" stage, for new contexts; None if there is none.

    If that exchanges facts, so does this, between dialogues that are asked about together. Those of a chat, which share
    an id, keep theirs.
    """
    stages = _stages(run)
    if not stages:
        return None
    return Finder.of(run.settings(stages[0].name, KnowledgeSettings), run.at(stages[0].name))


def check_knowledge(run: RunContext, **needed: str) -> None:
    """Raises ConfigError unless an earlier stage finds the facts that this stage reads.

    `needed` maps "social" (facts about people) and "entity" (about things), if read, to the setting that avoids them.
    """
    stages = _stages(run)
    if needed and not stages:
        raise ConfigError(
            f"config.{run.stage} reads facts, but no stage of kind 'knowledge' comes before it; add one to config.run, "
            f"or set {', and '.join(dict.fromkeys(needed.values()))}."
        )
    for source, without in needed.items():
        if getattr(stages[0].settings, source) is None:
            about = {"social": "people", "entity": "things"}[source]
            raise ConfigError(
                f"config.{run.stage} reads facts about {about}, but config.{stages[0].name}.{source} = None; "
                f"set it to a source, or set {without}."
            )


def _stages(run: RunContext) -> list[Stage]:
    """Returns the stages of kind "knowledge" before this one."""
    return [stage for stage in map(run.named, run.before()) if stage.kind == "knowledge"]
