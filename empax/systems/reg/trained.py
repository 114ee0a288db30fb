"""The models inside REG's checkpoints."""

from __future__ import annotations

from typing import Literal

from empax.core.config import ConfigError
from empax.core.run import RunContext
from empax.systems.dialogue.parts import Parts
from empax.systems.dialogue.trained import Trained, find_stage, trained_generator, trained_retriever
from empax.training.checkpoint import load_params

HELD = {"generator": ("generator",), "retriever": ("retriever",), "joint": ("generator", "retriever")}
"""Task of a stage → the models that its checkpoint holds, the main one first."""


def load_trained(
    run: RunContext, *, stage: str = "", what: Literal["", "generator", "retriever"] = "", adapters: bool = False
) -> Trained:
    """One model of a trained stage, without its emotion head.

    Args:
      run: whose work directory holds the stage.
      stage: a section of the config that trains a task of REG; empty = the last of them.
      what: which of the models that the stage holds; empty = the main one.
      adapters: gives the adapters alone, apart from the weights that they sit on, which are not even read.

    Raises:
      ConfigError: there is no such stage, or it holds no such model, or no adapters of it.
      CheckpointError: the stage has not been trained.
    """
    stage, task, chosen = find_stage(run, HELD, stage=stage, what=what)
    saved = load_params(run.files.stage(stage))  # before any model is made: it is what is most often missing
    if adapters and not (chosen == "generator" and "adapters" in saved):
        raise ConfigError(
            f"the {chosen} of stage {stage!r} has no adapters, it was trained whole: export it with --lora=merged "
            "(config.reg.lora makes a run train adapters of its generator)."
        )
    parts = Parts.of(run, with_params=False)
    params = saved["adapters"] if adapters else parts.stage_params(run, stage)
    params = params.get(chosen, params)  # of a joint stage, its part
    if chosen == "retriever":
        return trained_retriever(parts, stage, params)
    passages = parts.settings.passages if task == "joint" else 0
    return trained_generator(parts, stage, params["model"], passages=passages, adapters=adapters)
