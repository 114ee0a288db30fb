r"""EmpRL on a decoder-only model with low-rank adapters.

  python -m empax.main --config=configs/emprl_llm.py --config.data.dir=DATA               # SmolLM2 on two CPU cores
  python -m empax.main --config=configs/emprl_llm.py:sft --config.data.dir=DATA           # the paper's "w/o RL"
  python -m empax.main --config=configs/emprl_llm.py:expected --config.data.dir=DATA      # no_kl, grpo, ...
  python -m empax.main --config=configs/emprl_llm.py:dailydialog --config.data.dir=DATA   # and small talk
  python -m empax.main --config=configs/emprl_llm.py:empathetic-smollm2 --config.data.dir=DATA  # from published weights
  python -m empax.main --config=configs/emprl_llm.py:llama-3.1-8b --config.data.dir=DATA  # an accelerator
  python -m empax.main --config=configs/emprl_llm.py:FOLDER --config.data.dir=DATA        # any Llama or GPT-2
  python -m empax.main --config=configs/emprl_llm.py:tiny                                 # a trial with a random model
  python -m empax.main --config=configs/emprl_llm.py:FOLDER,grpo,tiny                     # a trial with that model

Models and fine-tuning are those of configs/reg_llm.py, identifiers and rewards those of configs/emprl_transformer.py.
The adapters of fine-tuning are merged into the weights. The result is the reference; the policy has new adapters on it.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common, emprl_transformer, layouts, reg_llm, reg_transformer

FORMS, FLAGS = emprl_transformer.ABLATIONS, emprl_transformer.FLAGS
MACHINES = reg_transformer.MACHINES


def get_config(arg: str = "") -> ConfigDict:
    models = (*reg_llm.LIGHT, *reg_llm.PRESETS)
    known = {"models": models, "folders": True, "forms": FORMS, "flags": FLAGS, "machines": MACHINES}
    chosen = common.arguments(arg, "emprl_llm.py", **known)
    model = chosen.model or "smollm2"
    machine = chosen.machine or ("cpu" if model in reg_llm.LIGHT else "gpu")
    config = recipe(model, chosen.form, machine)
    if machine == "gpu":
        common.on_gpu(config, lengths=2, remat=layouts.ON_GPU.get(model, "full"))
    if chosen.tiny:
        config = shrink(config, random=not chosen.model)
    return emprl_transformer.flagged(config, chosen)


def recipe(model: str, form: str, machine: str) -> ConfigDict:
    """Returns the whole system, or one of FORMS."""
    config = emprl_transformer.reinforced(reg_llm.recipe(model, "sft", machine), form)
    config.evaluate.update({"buckets": (48, 96), "batch_size": 16})
    if "ppo" in config:
        config.ppo.update({"buckets": (48, 96), "max_validation_examples": 100})
        config.ppo.optimizer.learning_rate = 1e-4  # ours: adapters are few and start at zero
    budget(config, machine)
    return config


def budget(config: ConfigDict, machine: str) -> None:
    """Sets steps and batches of the policy, and the number of evaluated rows."""
    if machine == "cpu":
        # ours: 2,000 of the 5,249 rows, from random dialogues; earlier runs answered the first 2,000
        config.evaluate.update({"limit": 2000, "head_examples": 300})
    else:
        config.evaluate.update({"limit": 0, "head_examples": 2000})
    if "ppo" not in config:
        return
    if machine == "cpu":
        config.ppo.batch_size //= 2
        config.ppo.update({"steps": 150, "max_examples": 2_400, "epochs": 2, "refresh_every_steps": 50})
        config.ppo.update({"log_every_steps": 5, "eval_every_steps": 50, "checkpoint_every_steps": 25})
        # ours: the rates of the policy's updates sum to those of the paper's 6,400. GRPO's policy learns in all 300
        # updates, PPO's in the last 274.
        config.ppo.optimizer.learning_rate = 4.27e-4
        if "value_warmup_steps" in config.ppo:
            config.ppo.value_warmup_steps = 13  # the same share of the steps as in configs/emprl_t5.py
            config.ppo.optimizer.learning_rate = 5.1e-4
            # of the value head, whose rate is that of configs/emprl_t5.py
            config.ppo.optimizer.groups = [{"pattern": "^(trained/)?value/", "learning_rate_scale": 11.0}]
    else:
        config.ppo.update({"steps": 1600, "max_examples": 0})  # the paper's steps


def shrink(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Shrinks the recipe to seconds; `random`: with a random model, else with the pretrained one."""
    return reg_llm.on_trial(emprl_transformer.shrink(config, pretrained=not random), random=random)
