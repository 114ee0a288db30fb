"""Training steps with logits of all target cells at once, against those of real tokens, part by part.

Both sides are ours; `empax.losses.real_tokens.over_real_tokens` chooses between them by device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import texts
from benchmarks.paired import Row, arguments, report, timed
from benchmarks.shapes import fields_of
from benchmarks.sides import check_agreement, random_model, use
from benchmarks.train_step import FusionTask, make_batches, our_steps
from empax.core.memory import keep_freed_memory
from empax.models.fusion_in_decoder import FusionInDecoder

HELD_EQUAL = (
    "one process; the same initial weights, batch, updates and masks of dropout, in bfloat16 on the same device; the "
    "losses at the end of the first round must agree",
    "ours: the output layer reads all cells of the target at once, padding included",
    "theirs: a loop over eighths of the cells, real ones first, which ends before the first of padding alone",
    "targets are padded to --target tokens; real_cells: share of the cells that count",
)

CLASSIC = {"vocab_size": 20_000, "d_model": 300, "d_kv": 20, "d_ff": 50, "num_heads": 2, "num_layers": 1}
"""T5 with about the sizes of the classic family."""

SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "t5-small, 32 rows": ({}, 32),
    "t5-small, 128 rows": ({}, 128),
    "classic, 32 rows": (CLASSIC, 32),
}
"""Differences from T5-small, and rows of a batch."""

_PASSAGE = 80


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=3, devices=True)
    texts.add_flag(parser)
    parser.add_argument("--size", nargs="*", choices=SIZES, default=tuple(SIZES), help="model and rows (all)")
    parser.add_argument("--target", type=int, default=64, help="tokens of a target, padding included (64)")
    parser.add_argument("--updates", type=int, help="updates in a round (20 on a GPU, 1 on a CPU)")
    options = parser.parse_args(argv)
    options.updates = options.updates or {"cpu": 1, "gpu": 20}[options.device]
    if options.smoke:
        options.target, options.updates, options.rounds = 24, 2, 1
    use(options.device)
    rows = {name: measure(name, options) for name in options.size}
    what = f"{texts.name_of(options.data)}; one passage of {_PASSAGE} tokens, targets of {options.target}"
    return report("real_tokens", rows, (*HELD_EQUAL, what), smoke=options.smoke, device=options.device)


def measure(name: str, options: argparse.Namespace) -> Row:
    """Measures seconds per update."""
    changes, count = SIZES[name]
    changes, count = ({"vocab_size": 400}, 4) if options.smoke else (changes, count)
    fields = fields_of("t5-small", small=options.smoke, **changes)
    sizes = {"passages": 1, "batch": count, "batches": 1, "buckets": [_PASSAGE], "max_passage": _PASSAGE}
    wanted = argparse.Namespace(**sizes, max_target=options.target, data=options.data)
    batch = make_batches(wanted, fields["vocab_size"])[0][1]
    sides = random_model(fields, dtype="bfloat16")
    tasks = [FusionTask(FusionInDecoder(sides.model), in_parts=apart) for apart in (False, True)]
    own = [jax.tree.map(jnp.copy, sides.params) for _ in tasks]  # a step donates its state
    ours, theirs = (our_steps(*one, [batch] * options.updates) for one in zip(tasks, own, strict=True))
    first = [side()["loss"].value() for side in (ours, theirs)]
    check_agreement(f"loss, {name}", *first, tolerance=2e-2)
    took = timed(ours, theirs, options.rounds, warm=True, pieces=options.updates)
    return Row(*took, "seconds", facts={"real_cells": round(float(np.mean(batch.target_mask)), 3)})


if __name__ == "__main__":
    keep_freed_memory()
    main()
