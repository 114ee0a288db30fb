"""Released outputs of other systems: scored with their text cleaning, and shown only beside comparable rows."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from empax.core.cache import kept
from empax.core.files import hash_file, hash_json, read_json, write_json
from empax.evaluation import published
from empax.evaluation.published import TestSet
from empax.evaluation.rows import read_all
from empax.evaluation.scoring import METRICS, VARIANTS, ScoringSettings, score
from empax.reporting.content import CLEANED

OF_LABELS = tuple(name for name in METRICS if name.endswith(("accuracy", "_match")) or "_f1" in name)
"""Metrics that do not depend on the cleaning of texts."""


def score_peers(folder: Path, *, cache: Path, settings: ScoringSettings) -> dict[str, dict[str, dict[str, float]]]:
    """Scores every *.jsonl in `folder`, by file name; caches results in `cache` by the hash of file and settings.

    The references of released outputs are cleaned, so metrics of the text are the variants "…:moel", which clean both
    sides.

    Raises:
      DataError: a file has a bad line.
    """
    cleaned = tuple(name for name in VARIANTS if name.endswith(CLEANED))
    settings = dataclasses.replace(settings, variants=cleaned, own=())
    peers = {}
    for path in sorted(folder.glob("*.jsonl")):
        stored = cache / f"{hash_json([hash_file(path), settings])}.json"
        make = functools.partial(_score_peer, path, settings)
        peers[path.stem] = kept(stored, make, write=write_json, read=read_json)
    return peers


def _score_peer(path: Path, settings: ScoringSettings) -> dict[str, dict[str, float]]:
    scores = score(read_all(path), settings=settings)
    of_labels = {name: value for name, value in scores.metrics.items() if name in OF_LABELS}
    return {**scores.variants, **of_labels}


def read_peer_sets(folder: Path) -> dict[str, TestSet]:
    """Identifies the test set of every *.jsonl in `folder`, by file name.

    Raises:
      DataError: see `score_peers`.
    """
    return {path.stem: published.identify(read_all(path)) for path in sorted(folder.glob("*.jsonl"))}


def why_apart(ours: TestSet, theirs: TestSet) -> str:
    """Returns why a peer's rows are not comparable with ours; empty = same corpus, and both whole or the same rows."""
    if ours.fingerprint == theirs.fingerprint or (ours.whole and theirs.corpus == ours.corpus):
        return ""
    return f"its rows are {theirs.title}, these are {ours.title}"
