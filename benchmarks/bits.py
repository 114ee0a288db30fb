"""Training steps of Fusion-in-Decoder: our sums of embeddings' gradients against XLA's.

On a GPU, XLA adds them in a varying order. Each side repeats the same updates from the same state; `same` says whether
the results are bitwise equal. `--deterministic` sets the flag of `config.deterministic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import texts
from benchmarks.paired import Row, arguments, report, timed
from benchmarks.shapes import fields_of
from benchmarks.sides import random_model, use
from benchmarks.train_step import FusionTask, make_batches
from empax.core.determinism import make_deterministic
from empax.core.memory import keep_freed_memory
from empax.core.types import Params, TrainState
from empax.models import arithmetic
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.training.optimizer import OptimizerSettings, make_optimizer
from empax.training.step import make_train_step

HELD_EQUAL = (
    "one process; the same initial weights, batches, updates and masks of dropout, in bfloat16 on the same device",
    "theirs: the same step, whose gradient of embeddings is XLA's sum of rows; ours sorts them first",
    "on a CPU both are the same program",
)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=5, devices=True)
    texts.add_flag(parser)
    parser.add_argument("--shape", default="t5-small", help="(t5-small)")
    parser.add_argument("--batch", type=int, default=64, help="examples a step (64)")
    parser.add_argument("--passages", type=int, default=6, help="K (6)")
    parser.add_argument("--tokens", type=int, default=144, help="tokens of a passage (144)")
    parser.add_argument("--updates", type=int, default=20, help="updates in a round (20)")
    parser.add_argument("--deterministic", action="store_true", help="set XLA's flag for deterministic operations")
    options = parser.parse_args(argv)
    if options.deterministic:
        make_deterministic()
    if options.smoke:
        options.batch, options.passages, options.tokens, options.updates, options.rounds = 2, 2, 16, 2, 1
    use(options.device)
    fields = fields_of(options.shape, small=options.smoke, **({"vocab_size": 400} if options.smoke else {}))
    options.batches, options.buckets = 1, [options.tokens]
    options.max_passage, options.max_target = options.tokens, 16
    batch = make_batches(options, fields["vocab_size"])[0][0]
    sides = random_model(fields, dtype="bfloat16", unroll=1 if options.smoke else 6)
    task = FusionTask(FusionInDecoder(sides.model))
    ours, ended = updates(task, sides.params, batch, options.updates)
    ours()
    sorted_first, arithmetic._picked = arithmetic._picked, lambda table, ids: table[ids]
    try:
        theirs, their_end = updates(task, sides.params, batch, options.updates)
        theirs()  # traced while patched
    finally:
        arithmetic._picked = sorted_first
    took = timed(ours, theirs, options.rounds, warm=True, pieces=options.updates)
    facts = {"same_ours": same(ended), "same_theirs": same(their_end)}
    rows = {"an update": Row(*took, "seconds", facts=facts)}
    sizes = f"{options.shape}, {options.batch} x {options.passages} passages of {options.tokens} tokens"
    flag = f"XLA's flag for one order: {options.deterministic}"
    return report("bits", rows, (*HELD_EQUAL, sizes, flag), smoke=options.smoke, device=options.device)


def updates(task: FusionTask, params: Params, batch: Any, count: int) -> tuple[Callable[[], None], list[Params]]:
    """Returns a function that makes `count` updates from the same initial state, and a list of the final parameters."""
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-4), params, total_steps=1)
    step = make_train_step(task, optimizer)
    first: Any = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0))
    ended: list[Params] = []

    def run() -> None:
        state = jax.tree.map(jnp.copy, first)  # a step donates its state
        for _ in range(count):
            state, _ = step(state, {}, batch)
        ended.append(jax.device_get(state.params))

    return run, ended


def same(ended: Sequence[Params]) -> bool:
    """Whether all are bitwise equal."""
    return all(
        np.array_equal(one, other)
        for tree in ended[1:]
        for one, other in zip(*map(jax.tree.leaves, (ended[0], tree)), strict=True)
    )


if __name__ == "__main__":
    keep_freed_memory()
    main()
