r"""EmpRL on a fine-tuned T5, the paper's backbone, sized for two CPU cores.

  python -m empax.main --config=configs/emprl_t5.py --config.data.dir=DATA
  python -m empax.main --config=configs/emprl_t5.py:sft --config.data.dir=DATA          # the paper's "w/o RL"
  python -m empax.main --config=configs/emprl_t5.py:expected --config.data.dir=DATA     # no_kl, grpo, ...
  python -m empax.main --config=configs/emprl_t5.py:dailydialog --config.data.dir=DATA  # and small talk
  python -m empax.main --config=configs/emprl_t5.py:FOLDER --config.data.dir=DATA       # another T5
  python -m empax.main --config=configs/emprl_t5.py:tiny                                # a trial with a random T5
  python -m empax.main --config=configs/emprl_t5.py:flan-t5-small-titles,grpo,tiny      # a trial with that model

Model and fine-tuning are those of configs/reg_t5.py: `--reuse=WORKDIR` takes the fine-tuning from a run of that recipe
(on a GPU, with "machine=cpu" for both, since REG's is longer there). Identifiers and rewards are those of
configs/emprl_transformer.py. The stages took six minutes on a shared H200, at less than a third of today's learning
rate: empathy F1 rises from 64.0 to 66.5 (docs/results/emprl.md).
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common, emprl_transformer, reg_t5

FORMS, FLAGS = emprl_transformer.ABLATIONS, emprl_transformer.FLAGS
MACHINES = emprl_transformer.MACHINES


def get_config(arg: str = "") -> ConfigDict:
    known = {"models": reg_t5.LIGHT, "folders": True, "forms": FORMS, "flags": FLAGS, "machines": MACHINES}
    chosen = common.arguments(arg, "emprl_t5.py", **known)
    config = recipe(chosen.model or reg_t5.WHEEL, chosen.form)
    if chosen.machine == "gpu":
        common.on_gpu(config, lengths=2)
    if chosen.tiny:
        config = shrink(config, random=not chosen.model)
    return emprl_transformer.flagged(config, chosen, common.T5_CONSENSUS)


def recipe(model: str, form: str) -> ConfigDict:
    """Returns the whole system, or one of FORMS."""
    start = reg_t5.recipe(model, "no_retrieval", "cpu")
    config = emprl_transformer.reinforced(start, form)
    # Fine-tuning first, as in REG's recipe, so that runs of both can share it.
    first = ("prepare", "generator")
    config.run = (*first, *(stage for stage in config.run if stage not in first))
    config.evaluate.update({"buckets": start.evaluate.buckets, "batch_size": 16})
    if "ppo" in config:
        config.ppo.update({"buckets": start.generator.buckets, "max_validation_examples": 500})
        # ours: the rates of the policy's updates sum to those of the paper's 6,400. GRPO's policy learns in all 900
        # updates, PPO's in the last 820.
        config.ppo.optimizer.learning_rate = 1.71e-4 if "value_warmup_steps" in config.ppo else 1.42e-4
    return config


def shrink(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Shrinks the recipe to seconds; `random`: with a random T5, else with the pretrained one."""
    config = emprl_transformer.shrink(config, pretrained=not random)
    if random:
        config.emprl.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
    else:
        config.evaluate.update({"limit": 16, "head_examples": 16})
    return config
