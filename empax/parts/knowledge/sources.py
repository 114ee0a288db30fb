"""The sources of facts about instances, by `SourceSettings`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from empax.core.cache import kept_rows
from empax.core.config import ConfigError
from empax.core.files import DataError, hash_file, hash_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.settings import cache_dir
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data import sample
from empax.data.corpora import data_folder
from empax.data.knowledge import (
    ENTITY_RELATIONS,
    SOCIAL_RELATIONS,
    Fact,
    clauses,
    distinct,
    facts_from,
    ranked,
    read_knowledge,
    source_of,
)
from empax.data.store import may_load
from empax.data.wordnet import WordNet
from empax.interop.pretrained import check_weights
from empax.parts.encoder.stages import check_encoder
from empax.parts.knowledge import atomic
from empax.parts.knowledge.generated import Comet, Prompted, check_model
from empax.parts.knowledge.settings import SourceSettings
from empax.parts.knowledge.vectors import TextEncoder

_CHUNK = 4096  # turns compared with all events at once


@runtime_checkable
class FactSource(Protocol):
    @property
    def name(self) -> str:
        """The name of the source in reports."""
        ...

    @property
    def hash(self) -> str:
        """A hash of everything that changes a fact."""
        ...

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        """Returns each instance's facts, and how many could not be parsed; `split` is empty outside a corpus."""
        ...


@dataclasses.dataclass(frozen=True)
class Files:
    """Facts from files, which rank them; outside the corpus there are none."""

    settings: SourceSettings

    @property
    def name(self) -> str:
        made_by = filter(None, dict.fromkeys(map(source_of, self._paths())))
        return ", ".join([*made_by, f"file {Path(self.settings.path).name}"])

    @property
    def hash(self) -> str:
        return hash_json([self.settings.source, [hash_file(path) for path in self._paths()]])

    def _paths(self) -> list[Path]:
        paths = dict.fromkeys(self.path(split) for split in ("train", "validation", "test"))
        return [path for path in paths if path.is_file()]

    def path(self, split: str) -> Path:
        """Returns the file of a split."""
        return expand(self.settings.path.replace("{split}", split))

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        if not split:
            return [([], 0) for _ in instances]
        known = read_knowledge(self.path(split), instances)
        return [(distinct(known.facts[i.id]), 0) for i in instances]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Hand-written facts for some instances of the built-in corpus."""

    name: str = "the built-in sample, written by hand"

    @property
    def hash(self) -> str:
        return hash_file(sample.FACTS)

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        known = sample.load_facts()
        return [(known.get(i.id, []), 0) for i in instances]


@dataclasses.dataclass(frozen=True)
class NearestEvent:
    """People's annotations of the ATOMIC event whose text is nearest to the last turn; ours, in place of COMET.

    Only the relations of NEC and CEM are kept. Tails are in the first person: word-level models have no word "PersonX".
    """

    events: Mapping[str, Sequence[Fact]]
    encoder: TextEncoder
    tails: int
    name: str = "ATOMIC, nearest event"

    @property
    def hash(self) -> str:
        rows = {event: [(fact.relation, fact.tail) for fact in facts] for event, facts in self.events.items()}
        return hash_json(["atomic, in the first person", rows, self.encoder.hash, self.tails])

    @functools.cached_property
    def _vectors(self) -> np.ndarray:
        return self.encoder([atomic.spoken(event) for event in self.events], progress="events")

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        names = list(self.events)
        found = []
        for event, similarity in self.nearest([i.context[-1] for i in instances], progress=split or None):
            told = [fact for fact in self.events[names[event]] if fact.relation in SOCIAL_RELATIONS]
            scored = [dataclasses.replace(f, tail=atomic.spoken_tail(f.tail), score=similarity) for f in told]
            found.append((ranked(scored, most=self.tails), 0))
        return found

    def nearest(self, texts: Sequence[str], *, progress: str | None = None) -> list[tuple[int, float]]:
        """Returns the index of each text's nearest event, and the cosine."""
        queries = self.encoder(texts, progress=progress)
        found: list[tuple[int, float]] = []
        for start in range(0, len(queries), _CHUNK):
            scores = queries[start : start + _CHUNK] @ self._vectors.T
            best = scores.argmax(axis=1)
            found += [(int(place), float(row[place])) for place, row in zip(best, scores, strict=True)]
        return found


@dataclasses.dataclass(frozen=True)
class Things:
    """Facts from WordNet about the things in a context."""

    wordnet: WordNet
    tails: int
    name: str = "WordNet"

    @property
    def hash(self) -> str:
        return hash_json(["wordnet", self.wordnet.hash, self.tails])

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        return [(self._facts(" ".join(i.context)), 0) for i in instances]

    def _facts(self, text: str) -> list[Fact]:
        facts = (fact for entity in self.wordnet.entities(text) for fact in self.wordnet.facts(entity))
        return ranked(facts, most=self.tails)


@dataclasses.dataclass(frozen=True)
class OfClauses:
    """A source that is also queried about each sentence of the last turn, which is the head of the facts found."""

    source: FactSource

    @property
    def name(self) -> str:
        return f"{self.source.name}, by clause"

    @property
    def hash(self) -> str:
        return hash_json(["clauses, each once", self.source.hash])

    def find(self, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
        asked = [(row, text) for row, i in enumerate(instances) for text in dict.fromkeys(clauses(i.context[-1]))]
        texts = list(dict.fromkeys(text for _, text in asked))
        found = list(self.source.find(instances, split))
        told = self.source.find([Instance(text, (text,), "", "") for text in texts], split) if texts else []
        known = dict(zip(texts, told, strict=True))
        for row, text in asked:
            (facts, dropped), (more, lost) = found[row], known[text]
            found[row] = [*facts, *(dataclasses.replace(fact, head=text) for fact in more)], dropped + lost
        return found


def load_source(settings: SourceSettings, run: RunContext, *, social: bool) -> FactSource:
    """Loads the source that `settings` name, for facts about people (`social`) or things, if it passes the check."""
    check_source(settings, run, social=social)
    found: FactSource
    match settings.source:
        case "file":
            found = Files(settings)
        case "sample":
            found = Sample()
        case "atomic":
            encoder = TextEncoder.of(settings.encoder, None, run.seed)
            events = atomic.read_events(atomic.find_files(_atomic_folder(settings, run)))
            found = NearestEvent(events, encoder, settings.tails)
        case "wordnet":
            found = Things(WordNet(Path(settings.path)), settings.tails)
        case "comet":
            found = Comet.of(settings, SOCIAL_RELATIONS if social else ENTITY_RELATIONS)
        case "llm":
            found = Prompted.of(settings)
    return OfClauses(found) if settings.clauses else found


def check_source(settings: SourceSettings, run: RunContext, *, social: bool) -> None:
    """Checks that the files of a source exist and that it has the facts queried, without loading weights.

    Raises:
      ConfigError: the source lacks such facts or settings, or a model is missing.
      DataError: a file is missing or broken.
    """
    name = settings.source
    wanted = {"atomic": True, "llm": True, "wordnet": False}.get(name)
    if wanted is not None and wanted != social:
        asked, knows = ("people", "things") if social else ("things", "people")
        raise ConfigError(
            f"config.{run.stage}.{'social' if social else 'entity'}.source = {name!r} has facts about {knows}, not "
            f"about {asked}; set it under {'entity' if social else 'social'}."
        )
    if settings.clauses and not social:
        raise ConfigError(
            f"config.{run.stage}.entity.clauses = True, but facts about things are found for whole contexts; leave it "
            "out."
        )
    if name == "comet" and not social:
        if not settings.entities:
            raise ConfigError(
                f'config.{run.stage}.entity.source = "comet" is asked about entities, but nothing finds the '
                "entities of a context; set entities to the folder of WordNet's database files."
            )
        WordNet(Path(settings.entities))
    if name == "file":
        for split in ("train", "validation", "test"):
            if not (path := Files(settings).path(split)).is_file():
                raise DataError(f"config.{run.stage}: there is no {path}, which path names for the split {split!r}.")
            note(f"the facts {settings.path!r}, {split}", path)
    elif name == "atomic":
        atomic.find_files(_atomic_folder(settings, run))
        if not settings.encoder.pretrained:
            raise ConfigError(
                f"config.{run.stage}: a random encoder finds no event; set encoder.pretrained, for example to 'minilm'."
            )
        check_encoder(settings.encoder, run)
    elif name == "wordnet":
        WordNet(Path(settings.path))
    elif name in ("comet", "llm") and may_load(run, settings.path):
        check_weights(settings.path)
        check_model(settings)


def _atomic_folder(settings: SourceSettings, run: RunContext) -> str:
    folder = settings.path or str(data_folder(run.plan.data.dir)[0])
    if not folder:
        raise ConfigError(
            f"config.{run.stage}: nothing says where ATOMIC's files are; set path to their folder, or config.data.dir "
            f"to the one that holds them under {atomic.FOLDER}/."
        )
    return folder


def kept_facts(source: FactSource, instances: Sequence[Instance], split: str) -> list[tuple[list[Fact], int]]:
    """Returns the facts of `source.find`, cached across runs by a hash of texts and source."""

    def make() -> list[dict[str, object]]:
        found = source.find(instances, split)
        return [{"facts": [fact.row() for fact in facts], "dropped": dropped} for facts, dropped in found]

    texts = [(i.id, i.context) for i in instances]
    path = cache_dir() / "knowledge" / f"{hash_json([source.hash, split, texts])}.jsonl"
    rows = kept_rows(path, make)
    return [(facts_from(row["facts"], str(path)), int(row["dropped"])) for row in rows]
