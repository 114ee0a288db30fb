"""Top-10 search of MiniLM's embeddings of EmpatheticDialogues: our ScaNN and exact indexes against FAISS.

Rows are the training pairs, and the same pairs tiled with noise to --rows; queries are validation contexts. Approximate
indexes use the cheapest settings with a recall@10 of 0.95, on these and on other queries; theirs is the faster of
IVF-PQ with re-ranking and HNSW.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import faiss
import numpy as np

from benchmarks import texts
from benchmarks.paired import DisagreementError, Row, arguments, cores, report, seconds, timed
from empax.data.exemplars import encode_keys, encode_queries
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.dual_encoder import Towers
from empax.retrieval.encode import CorpusEncoder
from empax.retrieval.exact import ExactIndex
from empax.retrieval.scann import ScannIndex, ScannSettings

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "the same float32 rows and queries of unit length in memory, inner product, k = 10",
    "approximate against approximate: the least work, of a list of settings, whose recall@10 is at least 0.95 on the "
    "measured queries and on as many others",
    "exact against exact: theirs is IndexFlatIP",
    "single queries: 64, one call each; batches: 256 in one call; again and again for about 0.3 seconds a round",
    "building is timed once; its bytes are reckoned, not measured: codes or links, without the rows themselves",
)

K, TARGET = 10, 0.95
_LEAST_SECONDS = 0.3  # of a round, by the duration of theirs

Search = Callable[[np.ndarray], np.ndarray]
"""A function from queries [Q, D] to ids [Q, K]."""


@dataclasses.dataclass(frozen=True)
class Found:
    """An index that is built and tuned."""

    name: str
    search: Search
    facts: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=5)
    texts.add_flag(parser)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of the large index; 0 = only the corpus (1000000)"
    )
    parser.add_argument("--noise", type=float, default=0.5, help="length of the noise on tiled rows of length 1 (0.5)")
    options = parser.parse_args(argv)
    faiss.omp_set_num_threads(cores())
    keys, queries = embeddings(options)
    sizes = {"corpus": keys}
    if options.rows > len(keys):
        sizes[f"{options.rows:,}"] = tiled(keys, options.rows, options.noise)
    rows: dict[str, Row] = {}
    for size, base in sizes.items():
        rows |= {f"{size}: {name}": row for name, row in measure(base, queries, options).items()}
    where = f"{texts.name_of(options.data)}: {len(keys)} rows; tiled with noise of length {options.noise}"
    return report("search", rows, (*HELD_EQUAL, where), smoke=options.smoke, faiss=faiss.__version__)


def embeddings(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns embeddings of the training pairs and of 512 validation contexts; cached in the library's cache."""
    if options.smoke:
        rng = np.random.default_rng(0)
        options.rounds, options.rows = 1, 0
        return unit(rng.normal(size=(1500, 32))), unit(rng.normal(size=(512, 32)))
    settings = EncoderSettings(pretrained="minilm", normalize=True, dropout=0.0, dtype="bfloat16", unroll=6)
    loaded = load_encoder(settings, load_tokenizer("minilm"))
    tokenizer = loaded.tokenizer
    encoder = CorpusEncoder(
        Towers(loaded.model),
        {"encoder": loaded.params},
        tokenizer.pad_id,
        query_text=functools.partial(encode_queries, tokenizer, max_tokens=64),
        key_text=functools.partial(encode_keys, tokenizer, max_tokens=96),
        hash="benchmarks.search",
    )
    keys = encoder.embed_keys(texts.instances(options.data, "train"), progress="rows")
    contexts = texts.instances(options.data, "validation")
    order = np.random.default_rng(0).permutation(len(contexts))[:512]
    return np.asarray(keys, np.float32), encoder.embed_queries([contexts[i] for i in order], progress="queries")


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def tiled(keys: np.ndarray, count: int, noise: float) -> np.ndarray:
    """Returns `count` rows: repeated keys, each copy with separate noise and rescaled to unit length."""
    rng = np.random.default_rng(0)
    made = np.empty((count, keys.shape[1]), np.float32)
    for start in range(0, count, len(keys)):
        part = keys[: count - start]
        moved = part + noise * unit(rng.standard_normal(part.shape, np.float32)) if start else part
        made[start : start + len(part)] = unit(moved)
    return made


def measure(base: np.ndarray, queries: np.ndarray, options: argparse.Namespace) -> dict[str, Row]:
    half = len(queries) // 2
    tuning, measured = queries[:half], queries[half:]
    flat, flat_built = built(lambda: their_flat(base))
    truth = {id(part): flat(part) for part in (tuning, measured)}
    exact, exact_built = built(lambda: our_exact(base))
    if recall(exact(measured), truth[id(measured)]) < 0.999:  # ties may be in another order
        raise DisagreementError("the exact indexes find different rows.")

    def good(search: Search) -> bool:
        return all(recall(search(part), truth[id(part)]) >= TARGET for part in (tuning, measured))

    ours = our_scann(base, good)
    candidates = [one for one in (their_ivf(base, good), their_hnsw(base, good)) if one is not None]
    rows = {}
    for name, count in (("single", 1), ("batch", len(measured))):
        parts = [measured[i : i + count] for i in range(0, len(measured), count)][:64]
        theirs = min(candidates, key=lambda one: seconds(runs(one.search, parts)))
        facts = {"their_index": theirs.name, "theirs_built": theirs.facts, "ours_built": ours.facts}
        facts |= {"recall_ours": recall(ours.search(measured), truth[id(measured)])}
        facts |= {"recall_theirs": recall(theirs.search(measured), truth[id(measured)])}
        rows[f"scann, {name}"] = rates(ours.search, theirs.search, parts, options.rounds, facts)
        facts = {"their_index": "flat", "seconds_to_build_ours": exact_built, "seconds_to_build_theirs": flat_built}
        rows[f"exact, {name}"] = rates(exact, flat, parts, options.rounds, facts)
    return rows


def rates(ours: Search, theirs: Search, parts: Sequence[np.ndarray], rounds: int, facts: dict[str, Any]) -> Row:
    once = seconds(runs(theirs, parts))
    parts = [*parts] * max(1, round(_LEAST_SECONDS / once))
    count = sum(len(part) for part in parts)
    took = timed(runs(ours, parts), runs(theirs, parts), rounds)
    return Row.of_rates(took, count, "queries/s", **facts)


def runs(search: Search, parts: Sequence[np.ndarray]) -> Callable[[], None]:
    def run() -> None:
        for part in parts:
            search(part)

    return run


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    hits = [len(set(one.tolist()) & set(other.tolist())) for one, other in zip(found, truth, strict=True)]
    return round(sum(hits) / truth.size, 4)


def built(make: Callable[[], Search]) -> tuple[Search, float]:
    begin = time.perf_counter()
    search = make()
    return search, round(time.perf_counter() - begin, 3)


def our_exact(base: np.ndarray) -> Search:
    index = ExactIndex(base)
    return lambda queries: index.search(queries, K).ids


def our_scann(base: np.ndarray, good: Callable[[Search], bool]) -> Found:
    """Builds an index with the fewest leaves, then the fewest candidates, that suffice."""
    leaves = ScannSettings().leaves(len(base))[0]
    begin = time.perf_counter()
    index = ScannIndex(base, ScannSettings())
    took = round(time.perf_counter() - begin, 2)
    codes = len(base) * (base.shape[1] // ScannSettings().dimensions_per_block) // 2
    for percent in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 40, 100):
        for reorder in (30, 50, 100):
            dials = {"leaves_to_search": max(1, round(percent * leaves / 100)), "reorder": reorder}
            tuned = index.searched(**dials)

            def search(queries: np.ndarray, index: ScannIndex = tuned) -> np.ndarray:
                return index.search(queries, K).ids

            if good(search):
                return Found("scann", search, {"leaves": leaves, **dials, "seconds": took, "bytes": codes})
    raise DisagreementError(f"ScaNN with all of its leaves does not reach recall@10 of {TARGET}.")


def their_flat(base: np.ndarray) -> Search:
    index = faiss.IndexFlatIP(base.shape[1])
    index.add(base)
    return lambda queries: index.search(queries, K)[1]


def their_ivf(base: np.ndarray, good: Callable[[Search], bool]) -> Found | None:
    """Builds IVF-PQ that re-ranks the 100 best by the rows."""
    leaves = max(1, int(len(base) ** 0.5))
    begin = time.perf_counter()
    index = faiss.index_factory(base.shape[1], f"IVF{leaves},PQ{base.shape[1] // 8},RFlat", faiss.METRIC_INNER_PRODUCT)
    index.train(base[np.random.default_rng(0).permutation(len(base))[: 64 * leaves]])
    index.add(base)
    took = round(time.perf_counter() - begin, 2)
    index.k_factor = 10.0
    inner = faiss.downcast_index(index.base_index)

    def search(queries: np.ndarray) -> np.ndarray:
        return index.search(queries, K)[1]

    for probes in (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, leaves):
        inner.nprobe = min(probes, leaves)
        if good(search):
            size = len(base) * (base.shape[1] // 8)
            return Found("ivf-pq", search, {"probes": inner.nprobe, "leaves": leaves, "seconds": took, "bytes": size})
    return None


def their_hnsw(base: np.ndarray, good: Callable[[Search], bool]) -> Found | None:
    begin = time.perf_counter()
    index = faiss.IndexHNSWFlat(base.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    index.add(base)
    took = round(time.perf_counter() - begin, 2)

    def search(queries: np.ndarray) -> np.ndarray:
        return index.search(queries, K)[1]

    for width in (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 256, 512, 1024):
        index.hnsw.efSearch = width
        if good(search):
            return Found("hnsw", search, {"ef": width, "seconds": took, "bytes": len(base) * 64 * 4})
    return None


if __name__ == "__main__":
    main()
