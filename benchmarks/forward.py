"""Forward pass of every architecture: empax under jax.jit against transformers and PyTorch on the same CPU.

Encoder-decoders and decoders return logits at every position, encoders their last states. Both sides must return the
same numbers before timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.paired import Row, arguments, report, seconds, timed
from benchmarks.shapes import SHAPES, fields_of, kind_of
from benchmarks.sides import TOLERANCE, Sides, check_agreement, on_device, random_model, use, wait
from empax.core.memory import keep_freed_memory
from empax.models.attention_kernels import AttentionKernel

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "what either side frees stays with the process for later (empax.core.memory), as in runs of empax.main",
    "the same random weights: transformers makes them in memory, our tables carry them over",
    "the same token ids, the same mask (rows padded on the right, a quarter of the tokens is padding), no dropout",
    "the same type of weights and arithmetic, --dtype; logits of all positions",
    "inputs lie in memory; a call counts until its result is there; both sides are warm; a round is --calls calls in a "
    "row, of which the mean counts (a single call of 150 ms varies by 15 percent)",
    "theirs: transformers' default attention, eager, torch.inference_mode, no cache kept",
    "ours: jax.jit, compiled before (compile_seconds in each row); the scan over layers is unrolled as --unroll says",
)

ARCHITECTURES = tuple(name for name in SHAPES if name not in ("t5-base", "t5-1.5b", "smollm2-360m"))


class Inputs(NamedTuple):
    """The inputs of a model; `target` is for encoder-decoders."""

    source: np.ndarray
    mask: np.ndarray
    target: np.ndarray


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=9, devices=True)
    parser.add_argument("--calls", type=int, default=3, help="calls in a round (3)")
    parser.add_argument(
        "--dtype", choices=sorted(TOLERANCE), default="float32", help="type of weights and arithmetic (float32)"
    )
    parser.add_argument("--compile", action="store_true", help="compile theirs with torch.compile")
    parser.add_argument(
        "--only", nargs="*", choices=ARCHITECTURES, default=ARCHITECTURES, help="architectures to measure (all)"
    )
    parser.add_argument("--batch", type=int, default=8, help="rows (8)")
    parser.add_argument("--source", type=int, default=128, help="tokens a row (128)")
    parser.add_argument("--target", type=int, default=32, help="target tokens a row (32)")
    parser.add_argument("--unroll", type=int, default=0, help="layers in one turn of our scan; 0 = all")
    parser.add_argument(
        "--attention", choices=get_args(AttentionKernel), default="auto", help="our attention program (auto)"
    )
    options = parser.parse_args(argv)
    if options.smoke:
        options.batch, options.source, options.target, options.rounds, options.calls = 2, 8, 4, 1, 1
    use(options.device)
    rows = {name: measure(name, options) for name in options.only}
    sizes = f"{options.batch} rows of {options.source} tokens, targets of {options.target}, {options.dtype}"
    sizes += f", our attention {options.attention}"
    return report("forward", rows, (*HELD_EQUAL, sizes), smoke=options.smoke, device=options.device)


def measure(name: str, options: argparse.Namespace) -> Row:
    """Measures one architecture."""
    fields = fields_of(name, small=options.smoke)
    dtype = jnp.dtype(options.dtype)
    # More than any number of layers: unrolls the whole scan.
    unroll, attention = options.unroll or 1000, options.attention
    sides = random_model(fields, param_dtype=dtype, dtype=options.dtype, unroll=unroll, attention=attention)
    inputs = random_inputs(fields["vocab_size"], options.batch, options.source, options.target)
    ours, theirs = our_call(sides, inputs), their_call(sides, inputs, fields["model_type"], options)
    compiling = seconds(ours)
    real = np.ones_like(inputs.target) > 0 if kind_of(fields["model_type"]) == "encoder-decoder" else inputs.mask
    found, expected = np.asarray(ours().astype(jnp.float32)), theirs().float().cpu().numpy()
    error = check_agreement(name, found[real], expected[real], tolerance=TOLERANCE[options.dtype])
    del found, expected
    facts = {"relative_error": float(f"{error:.2g}"), "compile_seconds": round(compiling, 2)}
    both = in_a_row(ours, options.calls), in_a_row(theirs, options.calls)
    return Row(*timed(*both, options.rounds, pieces=options.calls), "seconds", facts=facts)


def in_a_row(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """Returns a function that makes `calls` calls."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def random_inputs(vocab_size: int, batch: int, source: int, target: int) -> Inputs:
    """Returns rows of half to all of `source` tokens; no real token is one of the first ids, which are special."""
    rng = np.random.default_rng(0)
    lengths = np.linspace(source // 2, source, batch).astype(int)
    mask = np.arange(source)[None] < lengths[:, None]
    ids = rng.integers(4, vocab_size, (batch, source))
    # RoBERTa and MPNet use 1 as padding when they count positions; for the others it is masked.
    return Inputs(np.where(mask, ids, 1), mask, rng.integers(4, vocab_size, (batch, target)))


def our_call(sides: Sides, inputs: Inputs) -> Callable[[], Any]:
    """Returns a forward pass that waits for its result."""
    arrays = [jnp.asarray(inputs.source, jnp.int32), jnp.asarray(inputs.mask)]
    if hasattr(sides.model.config, "num_decoder_layers"):
        arrays.append(jnp.asarray(inputs.target, jnp.int32))
    run = jax.jit(lambda params, *args: sides.model.apply({"params": params}, *args))
    return lambda: jax.block_until_ready(run(sides.params, *arrays))


def their_call(
    sides: Sides, inputs: Inputs, model_type: str, options: argparse.Namespace
) -> Callable[[], torch.Tensor]:
    """Returns the same in PyTorch; an encoder-decoder gets its target shifted by one, which ours does itself."""
    kind = kind_of(model_type)
    on_device(options.device, sides.theirs)
    model, compiled = sides.theirs.to(getattr(torch, options.dtype)), options.compile
    mask = torch.tensor(inputs.mask).long()
    read: dict[str, Any] = {"input_ids": torch.tensor(inputs.source), "attention_mask": mask}
    if kind == "encoder-decoder":
        start = np.full((len(inputs.target), 1), model.config.decoder_start_token_id)
        read["decoder_input_ids"] = torch.tensor(np.concatenate([start, inputs.target[:, :-1]], axis=1))
    if kind != "encoder":
        read["use_cache"] = False
    forward = torch.compile(model, dynamic=False) if compiled else model

    def run() -> torch.Tensor:
        with torch.inference_mode():
            output = forward(**read)
            wait()
        return output.last_hidden_state if kind == "encoder" else output.logits

    return run


if __name__ == "__main__":
    keep_freed_memory()
    main()
