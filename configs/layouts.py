"""Layouts for TPU slices: rows per chip, mesh, rematerialisation. Their plans are in `results/plan/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from . import common


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a recipe on a slice.

    Attributes:
      rows: rows per chip in every training step.
      fsdp: number of chips that share one copy of the parameters; the rest of the slice is the axis `data`.
    """

    rows: int
    fsdp: int = 1


FEWEST_STEPS = 50

CHIPS = {"v5e:2x4": 8, "v5e:16x16": 256, "v5p:2x2x2": 8, "v5p:4x4x4": 64}

_SMALL = (Layout(8), Layout(8), Layout(16), Layout(16))
LAYOUTS = {
    model: dict(zip(CHIPS, layouts, strict=True))
    for model, layouts in {
        "small": _SMALL,
        "base": _SMALL,
        "large": (Layout(8, fsdp=4), Layout(8, fsdp=16), Layout(16), Layout(16)),
        "xl": (Layout(8, fsdp=8), Layout(8, fsdp=256), Layout(16, fsdp=2), Layout(16, fsdp=64)),
        "llama-3.1-8b": (Layout(16, fsdp=4), Layout(16, fsdp=256), Layout(16, fsdp=2), Layout(16, fsdp=64)),
    }.items()
}
"""Layouts by model and slice; all use full rematerialisation."""

MACHINES = ("cpu", "gpu", *CHIPS)

ON_GPU: dict[str, str] = {
    **dict.fromkeys(("flan-t5-small-titles", "empathetic-t5-small", "small", "base"), "none"),
    **dict.fromkeys(("smollm2", "empathetic-smollm2"), "minimal"),
}
"""Rematerialisation of a model on one GPU of 80 GB; others use "full", since their activations would not fit.

A plan of `reg_t5.py:base` for one GPU, made on a CPU, needs at most 65 GB (stage "exemplars").
"""


def sized(
    arg: str,
    file: str,
    recipe: Callable[[str, str, str], ConfigDict],
    shrink: Callable[..., ConfigDict],
    *,
    light: Sequence[str],
    models: Sequence[str],
    forms: Sequence[str],
) -> ConfigDict:
    """Returns the recipe of a pretrained model for the argument `arg`.

    Args:
      arg: the text after the colon of `--config`.
      file: file name of the recipe.
      recipe: makes the recipe from model, form and "cpu", "gpu" or "slice".
      shrink: makes its trial; `random` is whether no model was named.
      light: models for two CPU cores; the first is the default.
      models: models for an accelerator.
      forms: alternatives to the whole system.
    """
    chosen = common.arguments(arg, file, models=(*light, *models), folders=True, forms=forms, machines=MACHINES)
    model = chosen.model or light[0]
    machine = chosen.machine or ("cpu" if model in light else "gpu")
    config = recipe(model, chosen.form, "slice" if machine in CHIPS else machine)
    if machine in CHIPS:
        return on_topology(config, model, machine)
    if machine == "gpu":
        common.on_gpu(config, lengths=2, remat=ON_GPU.get(model, "full"))
    return shrink(config, random=not chosen.model) if chosen.tiny else config


def on_topology(config: ConfigDict, model: str, topology: str) -> ConfigDict:
    """Adapts `config` to `model` on `topology`: as many examples in fewer, larger steps (at least FEWEST_STEPS).

    Learning rates do not change: none was tuned for batches of that size.

    Raises:
      ValueError: there is no layout for the model and topology.
    """
    chosen = LAYOUTS.get(model, {})
    if topology not in chosen:
        raise ValueError(f"machine={topology}: {model} has a layout for {', '.join(chosen) or 'no slice'}.")
    layout, chips = chosen[topology], CHIPS[topology]
    config.mesh.fsdp = layout.fsdp
    config.plan.topology = topology
    config[config.system].generator.remat = "full"
    for name in config.run:
        stage = config[name]
        if stage.kind != "train":
            continue
        rows = layout.rows * chips
        steps = max(FEWEST_STEPS, round(stage.steps * stage.batch_size / rows))
        often = steps // 4
        stage.update({"steps": steps, "batch_size": rows, "eval_every_steps": often, "checkpoint_every_steps": often})
        stage.optimizer.warmup_steps = min(stage.optimizer.get("warmup_steps", 0), steps // 10)
        if stage.get("refresh_every_steps"):
            stage.refresh_every_steps = often
    return config
