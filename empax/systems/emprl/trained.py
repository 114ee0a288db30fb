"""The generators inside EmpRL's checkpoints, fine-tuned or reinforced."""

from __future__ import annotations

from empax.core.config import ConfigError
from empax.core.run import RunContext
from empax.systems.dialogue.parts import Parts
from empax.systems.dialogue.trained import Trained, find_stage, trained_generator
from empax.systems.emprl.stages import first_params, policy_model, policy_settings
from empax.training.checkpoint import load_params

HELD: dict[str, tuple[str, ...]] = dict.fromkeys(("generator", "ppo", "grpo"), ("generator",))


def load_trained(run: RunContext, *, stage: str = "", what: str = "", adapters: bool = False) -> Trained:
    """The generator of a trained stage, without emotion head and value head.

    Args:
      run: whose work directory holds the stage.
      stage: a section of the config that trains a task of EmpRL; empty = the last of them.
      what: "generator" or empty.
      adapters: gives fine-tuning's adapters alone. Those of a policy sit on weights that no other library has.

    Raises:
      ConfigError: there is no such stage, or it holds no such model, or no adapters that stand alone.
      CheckpointError: the stage has not been trained.
    """
    stage, task, _ = find_stage(run, HELD, stage=stage, what=what)
    saved = load_params(run.files.stage(stage))
    if adapters and (task != "generator" or "adapters" not in saved):
        raise ConfigError(
            f"stage {stage!r} has no adapters that sit on pretrained weights: export it with --lora=merged."
        )
    parts = Parts.of(run, with_params=False)
    if task == "generator":
        params = saved["adapters"] if adapters else parts.stage_params(run, stage)
        return trained_generator(parts, stage, params["model"], passages=0, adapters=adapters)
    settings = policy_settings(run, stage)
    model = policy_model(parts, saved, first_params(parts, run, settings.start_from), settings.kept_share)
    passages = parts.settings.passages if settings.index else 0
    return trained_generator(parts, stage, model, passages=passages)
