"""Stage "index": embeds the training pairs, builds the index, and retrieves candidates for later stages."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from empax.core.config import LARGEST_INT, ConfigError, check_numbers
from empax.core.files import hash_file, hash_json, replacing, write_json
from empax.core.protocols import InstanceEncoder
from empax.core.sharding import local_mesh
from empax.core.system import RunContext, load_encoder_of
from empax.core.types import Instance
from empax.data import own
from empax.data.batches import draw_dialogues, draw_rows
from empax.data.exemplars import dialogue_groups, emotion_ids, num_turns, replies_alone, traits
from empax.data.store import check_prepared, has_emotions, load_instances
from empax.evaluation.retrieval import (
    POOL,
    SHOWN,
    exemplar_statistics,
    gold_ranks,
    recall_statistics,
    text_numbers,
    with_intervals,
)
from empax.retrieval.filters import ExemplarFilter, Filter, find_exemplars, fit_emotions
from empax.retrieval.index import Index, IndexSettings, build_index, check_installed, measure_recall

log = logging.getLogger("empax")

RECALL_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      encoder: stage that trained the retriever; empty = the pretrained one.
      candidates: M, candidates per context; training chooses K of them.
      queries: number of instances to search for in each split (0 = all), drawn once with the run's seed, so that stages
        with fewer queries use a subset of those with more.
      filter: "none"; "predicted_emotion" keeps rows of the emotion predicted from the context's vector; "gold_emotion"
        keeps rows of the dialogue's emotion, as LEMPEx' code does. That emotion is unknown at test time: it is a leak,
        and the report says so.
      same_turn: whether exemplars come from the same turn of a dialogue as the response, if enough of the searched rows
        do; ours.
      one_per_dialogue: whether a context gets at most one exemplar per dialogue, the best one; ours.
      searched: with a filter or `same_turn`, rows to retrieve per context; LEMPEx' code: 2,047.
      quality: split → contexts to measure retrieval on (of dialogues drawn with the run's seed), 0 = all; see
        `evaluation.retrieval`.
      beam: options of Apache Beam, which then embeds the corpus: ("--runner=DirectRunner",) in this process,
        ("--runner=FlinkRunner", ...) on a cluster that sees the work directory; none = without Beam.
    """

    encoder: str = ""
    store: IndexSettings = dataclasses.field(default_factory=IndexSettings)
    candidates: int = 6
    queries: dict[str, int] = dataclasses.field(default_factory=lambda: {"train": 0, "validation": 0})
    filter: Filter = "none"
    same_turn: bool = False
    one_per_dialogue: bool = True
    searched: int = 2047
    quality: dict[str, int] = dataclasses.field(default_factory=dict)
    beam: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "candidates", "searched", least=1)
        for setting in ("queries", "quality"):
            for split, number in getattr(self, setting).items():
                if split not in own.SPLITS or not 0 <= number <= LARGEST_INT:
                    raise ConfigError(
                        f"{setting} has {split!r} = {number}; it maps {', '.join(own.SPLITS)} to the number of "
                        "instances to search, 0 for all."
                    )
        if (self.filter != "none" or self.same_turn) and self.searched < self.candidates:
            raise ConfigError(
                f"searched = {self.searched} rows are filtered, but candidates = {self.candidates} are wanted; set "
                "searched to at least as many."
            )


def check(settings: Settings, run: RunContext) -> None:
    """Checks that the encoder is trained before, and that the search library is installed.

    Raises:
      ConfigError: no earlier stage trains that encoder, or there is none; ScaNN, pymilvus or Beam is missing.
    """
    check_prepared(run)
    if settings.encoder:
        run.earlier("encoder", settings.encoder, able=("leaves an encoder", lambda spec: spec.encoder is not None))
    elif run.plan.system.encoder is None:
        raise ConfigError(
            f"config.{run.stage}.encoder is empty, but the system {run.plan.system.name!r} has no encoder of its own; "
            "leave that stage out, or name a stage that trains one."
        )
    check_installed(settings.store)
    own.check_beam(settings.beam, f"config.{run.stage}.beam")
    if settings.filter != "none" and not has_emotions(run.plan.data, "train"):
        raise ConfigError(
            f"config.{run.stage}.filter = {settings.filter!r}, but no dialogue of the split 'train' has an emotion; "
            'give them emotions, or set filter = "none".'
        )


def run(settings: Settings, run: RunContext) -> None:
    encoder, mesh = load_encoder_of(run, settings.encoder), local_mesh()
    corpus = load_instances(run, "train")
    groups = dialogue_groups(corpus)
    begin = time.perf_counter()
    if settings.beam:
        keys = _embedded_by_beam(settings, run, encoder.hash)
    else:
        keys = encoder.embed_keys(corpus, progress=f"{run.stage}: keys", mesh=mesh)
    embedded = time.perf_counter()
    index = build_index(keys, settings.store, groups=groups, encoder_hash=encoder.hash, mesh=mesh)
    built = time.perf_counter()
    index.save(run.files.index(run.stage))
    search = _Search(run.stage, encoder, index, _make_filter(settings, run, encoder, corpus, mesh), mesh)
    sample = keys[draw_rows(len(keys), RECALL_QUERIES)]
    for split, limit in settings.queries.items():
        instances = load_instances(run, split)
        order = np.random.default_rng(run.seed).permutation(len(instances))
        positions = order[:limit] if limit else order
        queries, found = search(split, [instances[p] for p in positions], settings.candidates)
        _save(run, split, positions, found, settings.filter)
        sample = queries[:RECALL_QUERIES]
    about = {
        "rows": len(corpus),
        "method": settings.store.method,
        "recall_at_10": measure_recall(index, index.exact, sample, k=min(10, len(corpus))),
        "seconds_embedding": embedded - begin,
        "seconds_building": built - embedded,
        **search.about(),
    }
    log.info("%s: recall@10 %.4f over %d rows", run.stage, about["recall_at_10"], len(corpus))
    if settings.quality:
        about["quality"] = {
            split: _quality(run, split, limit, corpus, keys, search) for split, limit in settings.quality.items()
        }
    write_json(run.directory / "index.json", about)


def _make_filter(
    settings: Settings, run: RunContext, encoder: InstanceEncoder, corpus: Sequence[Instance], mesh: Mesh | None
) -> ExemplarFilter | None:
    """Builds the filter of the settings and saves it in the stage's folder, for answering."""
    if not (settings.filter != "none" or settings.same_turn or settings.one_per_dialogue):
        return None
    emotions, weights = emotion_ids(corpus), None
    searched = settings.searched if settings.filter != "none" or settings.same_turn else 0
    if settings.filter == "predicted_emotion":
        contexts = encoder.embed_queries(corpus, progress=f"{run.stage}: train", mesh=mesh)
        weights = fit_emotions(contexts, emotions)
    turns = num_turns(corpus) if settings.same_turn else None
    made = ExemplarFilter(settings.filter, searched, emotions, weights, turns, settings.one_per_dialogue)
    made.save(run.directory)
    return made


@dataclasses.dataclass
class _Search:
    """Searches for contexts, and collects statistics of the filter."""

    stage: str
    encoder: InstanceEncoder
    index: Index
    filter: ExemplarFilter | None
    mesh: Mesh | None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, split: str, instances: Sequence[Instance], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns vectors of the contexts, [Q, D], and rows of the index, [Q, k], -1 = none."""
        queries = self.encoder.embed_queries(instances, progress=f"{self.stage}: {split}", mesh=self.mesh)
        asked = traits(instances)
        found = find_exemplars(self.index, queries, k, **asked, filter=self.filter)
        ids = np.asarray(found.ids)
        if self.filter is not None:
            self._tell(split, queries, asked["emotions"], ids, k)
        return queries, ids

    def _tell(self, split: str, queries: np.ndarray, emotions: np.ndarray, ids: np.ndarray, k: int) -> None:
        assert self.filter is not None
        short, known = int((ids < 0).any(axis=1).sum()), emotions >= 0
        note: dict[str, Any] = {"contexts": len(ids), "with_too_few": short}
        if self.filter.weights is not None and known.any():
            right = self.filter.predict(queries[known]) == emotions[known]
            note["emotion_accuracy"] = 100.0 * float(right.mean())
        self.notes.setdefault(split, note)  # the measure of quality asks the same split once more
        log.info(
            "%s: %d of %d contexts of %s have fewer than %d exemplars (filter: %s)",
            self.stage, short, len(ids), split, k, self.filter.kind,
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """Returns the description of the filter, if there is one; it marks the gold emotion as a leak."""
        if self.filter is None:
            return {}
        leak = {"leak": self.filter.kind} if self.filter.kind == "gold_emotion" else {}
        about = {
            "kind": self.filter.kind,
            "same_turn": self.filter.turns is not None,
            "one_per_dialogue": self.filter.one_per_dialogue,
            **({"searched": self.filter.searched} if self.filter.searched else {}),
        }
        return {**leak, "filter": {**about, **self.notes}}


def _quality(
    run: RunContext, split: str, limit: int, corpus: Sequence[Instance], keys: np.ndarray, search: _Search
) -> dict[str, Any]:
    """Measures how well contexts of a split retrieve their gold responses among `keys`, and their exemplars."""
    chosen = draw_dialogues(load_instances(run, split), limit, seed=run.seed)
    queries, found = search(split, chosen, SHOWN)
    shown = chosen
    if getattr(run.plan.system_settings, "key", "response") == "exchange":  # its context would find a gold exchange
        keys = search.encoder.embed_keys(replies_alone(corpus), mesh=search.mesh)
        shown = replies_alone(chosen)
    gold = search.encoder.embed_keys(shown, progress=f"{run.stage}: gold", mesh=search.mesh)
    groups, texts = dialogue_groups(chosen), [i.response for i in corpus]
    numbers = text_numbers([*texts, *(i.response for i in chosen)])
    ignored = [(numbers[len(texts) :], numbers[: len(texts)]), (groups, dialogue_groups(corpus))]
    pool = np.sort(np.random.default_rng(run.seed).permutation(len(texts))[:POOL])

    def ranks(rows: np.ndarray | slice) -> np.ndarray:
        return gold_ranks(queries, gold, keys[rows], [(mine, others[rows]) for mine, others in ignored])

    statistics = {
        **recall_statistics(ranks(pool), f"{len(pool) + 1}"),
        **recall_statistics(ranks(slice(None)), "all"),
        **exemplar_statistics(
            found, texts=texts, emotions=emotion_ids(corpus), wanted=emotion_ids(chosen),
            dialogues=np.unique([i.dialogue_id for i in chosen], return_inverse=True)[1], turns=num_turns(chosen),
        ),
    }  # fmt: skip
    metrics = with_intervals(statistics, groups)
    told = ", ".join(f"{name} {m['value']:.1f} [{m['low']:.1f}, {m['high']:.1f}]" for name, m in metrics.items())
    log.info("%s: %s, %d contexts: %s", run.stage, split, len(chosen), told)
    return {"contexts": len(chosen), "metrics": metrics}


def _embedded_by_beam(settings: Settings, run: RunContext, encoder_hash: str) -> np.ndarray:
    from empax.retrieval.beam import embed_file  # imported here: Beam is rarely installed

    path = run.files.instances("train")
    folder = run.directory / "parts" / hash_json([encoder_hash, hash_file(path)])
    make_encoder = functools.partial(load_encoder_of, run, settings.encoder)
    return embed_file(path, make_encoder, folder, options=settings.beam)


def _save(run: RunContext, split: str, positions: np.ndarray, ids: np.ndarray, filter: Filter) -> None:
    path, more = run.directory / f"candidates_{split}.npz", {}
    if filter != "none":
        more["filter"] = np.array(filter)
    with replacing(path) as temporary:
        np.savez(temporary, positions=positions, ids=ids, **more)
