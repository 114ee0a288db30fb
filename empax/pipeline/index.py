"""Stage "index": embed the training pairs, build the index, and look up candidates for the stages that follow."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time

import numpy as np

from empax.core.config import LARGEST_INT, ConfigError, check_numbers
from empax.core.files import hash_file, hash_json, write_atomically, write_json
from empax.core.run import RunContext
from empax.core.sharding import local_mesh
from empax.core.system import load_encoder_of
from empax.data import own
from empax.data.exemplars import dialogue_groups
from empax.data.store import check_prepared, load_instances
from empax.retrieval.index import IndexSettings, build_index, check_installed, measure_recall

log = logging.getLogger("empax")

RECALL_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      encoder: the stage that trained the retriever; empty = as pretrained.
      candidates: M, rows looked up per context; training over-retrieves these and picks K of them.
      queries: how many instances of each split are searched (0 = all), chosen once at random by the run's seed, so that
        stages which search fewer see a part of what stages that search more see.
      beam: options of Apache Beam, which then embeds the corpus: ("--runner=DirectRunner",) in this process,
        ("--runner=FlinkRunner", ...) on a cluster that sees the work directory; none = without it.
    """

    encoder: str = ""
    store: IndexSettings = dataclasses.field(default_factory=IndexSettings)
    candidates: int = 6
    queries: dict[str, int] = dataclasses.field(default_factory=lambda: {"train": 0, "validation": 0})
    beam: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "candidates", least=1)
        for split, number in self.queries.items():
            if split not in own.SPLITS or not 0 <= number <= LARGEST_INT:
                raise ConfigError(
                    f"queries has {split!r} = {number}; it maps {', '.join(own.SPLITS)} to how many instances are "
                    "searched, 0 for all."
                )


def check(settings: Settings, run: RunContext) -> None:
    """Whether the encoder is trained before, and what searches is installed.

    Raises:
      ConfigError: no stage before this one trains that encoder, or there is none; ScaNN, pymilvus or Beam is missing.
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
    sample = keys[:RECALL_QUERIES]
    for split, limit in settings.queries.items():
        instances = load_instances(run, split)
        order = np.random.default_rng(run.seed).permutation(len(instances))
        positions = order[:limit] if limit else order
        chosen = [instances[p] for p in positions]
        queries = encoder.embed_queries(chosen, progress=f"{run.stage}: {split}", mesh=mesh)
        found = index.search(queries, settings.candidates, query_groups=dialogue_groups(chosen))
        _save(run, split, positions, np.asarray(found.ids))
        sample = queries[:RECALL_QUERIES]
    about = {
        "rows": len(corpus),
        "method": settings.store.method,
        "recall_at_10": measure_recall(index, index.exact, sample, k=min(10, len(corpus))),
        "seconds_embedding": embedded - begin,
        "seconds_building": built - embedded,
    }
    log.info("%s: recall@10 %.4f over %d rows", run.stage, about["recall_at_10"], len(corpus))
    write_json(run.directory / "index.json", about)


def _embedded_by_beam(settings: Settings, run: RunContext, encoder_hash: str) -> np.ndarray:
    own.check_beam(settings.beam, f"config.{run.stage}.beam")
    from empax.retrieval.beam import embed_file  # not above: few have it

    path = run.files.instances("train")
    folder = run.directory / "parts" / hash_json([encoder_hash, hash_file(path)])
    make_encoder = functools.partial(load_encoder_of, run, settings.encoder)
    return embed_file(path, make_encoder, folder, options=settings.beam)


def _save(run: RunContext, split: str, positions: np.ndarray, ids: np.ndarray) -> None:
    path = run.directory / f"candidates_{split}.npz"
    write_atomically(path, lambda temporary: np.savez(temporary, positions=positions, ids=ids))
