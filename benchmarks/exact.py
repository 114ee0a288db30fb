"""Exact search of random rows: empax.retrieval against a product and `topk` in PyTorch, on one device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.paired import DisagreementError, Row, arguments, cores, report, timed
from benchmarks.sides import on_device, use
from empax.retrieval.exact import ExactIndex

HELD_EQUAL = (
    "one process; the same rows of unit length, stored in --store on the device that searches; inner product, k = 10",
    "queries come from the host in float32, and ids go back to it; a call counts until they are there",
    "theirs: queries in the rows' type, one product and torch.topk; of float32 rows at full precision",
    "ours: as runs search, in float32 whatever the rows are stored as, groups of rows looked at",
    "ids of both are compared with a product in float64: recall_ours, recall_theirs",
    "least: seconds of a call of ours that searches 64 rows, which are the host's and the transfers'",
)

K = 10
_CHECKED = 4


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=7, devices=True)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the index (200000)")
    parser.add_argument("--dim", type=int, default=768, help="numbers in a row (768)")
    parser.add_argument(
        "--store",
        nargs="*",
        choices=("float32", "float16"),
        default=("float32",),
        help="types to store the rows in (float32)",
    )
    parser.add_argument("--queries", type=int, nargs="*", default=(1, 256), help="queries in a call (1 256)")
    parser.add_argument("--calls", type=int, default=5, help="calls in a round (5)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.rows, options.dim, options.rounds, options.calls = 500, 16, 1, 1
    use(options.device)
    on_device(options.device)
    torch.set_num_threads(cores())
    torch.set_float32_matmul_precision("highest")
    rng = np.random.default_rng(0)
    sizes = (options.rows, max([256, *options.queries]))
    rows, queries = (unit(rng.standard_normal((n, options.dim), np.float32)) for n in sizes)
    measured = {}
    for store in options.store:
        stored = rows.astype(store)
        for count in options.queries:
            measured[f"{store}, {count} a call"] = measure(stored, queries[:count], options.calls, options.rounds)
    what = f"{options.rows} rows of {options.dim} numbers"
    return report("exact", measured, (*HELD_EQUAL, what), smoke=options.smoke, device=options.device)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def measure(rows: np.ndarray, queries: np.ndarray, calls: int, rounds: int) -> Row:
    """Measures seconds per call."""
    index = ExactIndex(rows, groups=np.arange(len(rows)) // 4)
    placed = torch.tensor(rows)
    own = np.full(len(queries), -1)
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        for _ in range(calls):
            found["ours"] = np.asarray(index.search(queries, K, query_groups=own).ids)

    def theirs() -> None:
        for _ in range(calls):
            scores = torch.tensor(queries).to(placed.dtype) @ placed.T
            found["theirs"] = torch.topk(scores, K, dim=1).indices.cpu().numpy()

    took = timed(ours, theirs, rounds, pieces=calls)
    few = ExactIndex(rows[:64], groups=np.arange(64))  # hardly any work: the overhead of a call
    call = lambda: [few.search(queries, K, query_groups=own) for _ in range(calls)]  # noqa: E731
    host = statistics.median(timed(call, call, rounds, pieces=calls)[0])
    facts: dict[str, Any] = {f"recall_{side}": recall(ids, rows, queries) for side, ids in found.items()}
    if facts["recall_ours"] < 1.0:
        raise DisagreementError(f"exact search found {facts['recall_ours']:.1%} of the best rows.")
    return Row(*took, "seconds", facts={**facts, "least": host, "bytes": rows.nbytes})


def recall(ids: np.ndarray, rows: np.ndarray, queries: np.ndarray) -> float:
    """Returns the recall of the best rows, over the first few queries."""
    scores = queries[:_CHECKED].astype(np.float64) @ rows.astype(np.float64).T
    best = np.argsort(-scores, axis=1)[:, :K]
    return float(np.mean([len({*one} & {*other}) / K for one, other in zip(ids, best, strict=False)]))


if __name__ == "__main__":
    main()
