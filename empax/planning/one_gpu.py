"""`--mode=plan --config.plan.topology=gpu`: whether a recipe's training steps fit in the memory of one GPU."""

from __future__ import annotations

import jax

from empax.core.system import RunPlan, Stage
from empax.core.tree import count_params
from empax.planning.slices import lay_out, stages_to_compile

CARDS = {"80 GB (A100, H100)": 80e9, "141 GB (H200)": 141e9}

_NOTES = {
    "gpu": "compiled for this GPU",
    "cpu": "compiled for this CPU, which keeps more in float32: of what it says, training steps of T5-small took 0.56 "
    "(layers unrolled) and 0.78 (scanned) on an H200",
}


def describe_gpu(plan: RunPlan) -> str:
    """Lines for each training stage: bytes at the peak of a step, by the compiler, and the cards that have them."""
    backend = jax.default_backend()
    lines = [f"one GPU; {_NOTES.get(backend, f'compiled for {backend}')}"]
    for stage in stages_to_compile(plan):
        lines += [f"{stage.name}:", *_lines(plan, stage)]
    return "\n".join(lines)


def _lines(plan: RunPlan, stage: Stage) -> list[str]:
    laid = lay_out(plan, stage, jax.devices()[:1])
    compiled = laid.step.lower(laid.template, laid.frozen, laid.batch).compile()
    found = compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak = held + found.temp_size_in_bytes
    room = " and ".join(card for card, most in CARDS.items() if peak <= most) or f"no card of {' or '.join(CARDS)}"
    return [
        f"  {count_params(laid.template.params) / 1e6:,.1f} M parameters, {stage.loop.batch_size} rows a step",
        f"  memory at the peak, GB: {held / 1e9:.2f} state, frozen and batch, {found.temp_size_in_bytes / 1e9:.2f} "
        f"temporary with activations: {peak / 1e9:.2f}; fits in {room}",
    ]
