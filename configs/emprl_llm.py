r"""EmpRL on a decoder-only model with low-rank adapters.

  python -m empax.main --config=configs/emprl_llm.py:smollm2 --config.data.dir=DATA          # sized for two CPU cores
  python -m empax.main --config=configs/emprl_llm.py:smollm2,sft --config.data.dir=DATA      # the paper's "w/o RL"
  python -m empax.main --config=configs/emprl_llm.py:smollm2,expected --config.data.dir=DATA # no_kl, grpo, ...
  python -m empax.main --config=configs/emprl_llm.py:llama-3.1-8b --config.data.dir=DATA     # accelerators
  python -m empax.main --config=configs/emprl_llm.py:FOLDER --config.data.dir=DATA           # any Llama or GPT-2
  python -m empax.main --config=configs/emprl_llm.py:FOLDER,grpo+tiny  # a trial on the built-in sample, as of any form
  python -m empax.main --config=configs/emprl_llm.py:smollm2+dailydialog --config.data.dir=DATA  # and small talk
  python -m empax.main --config=configs/emprl_llm.py:tiny              # a trial with a random model, without adapters

Models and fine-tuning are those of configs/reg_llm.py, identifiers and rewards those of configs/emprl_transformer.py.
Fine-tuning's adapters are summed into the weights. That is the reference, and the policy has new adapters on it.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from . import emprl_transformer, reg_llm, reg_transformer

FORMS = ("", "expected", "sft", "no_kl", "no_reward", "grpo", "trajectory")


def get_config(arg: str = "smollm2") -> ConfigDict:
    head, *behind = arg.split("+")
    name, _, form = head.partition(",")
    known = name in ("tiny", *reg_llm.MODELS) or Path(name).is_dir()
    if not known or form not in FORMS or not set(behind) <= set(emprl_transformer.BEHIND):
        raise ValueError(
            f"emprl_llm.py:{arg} is unknown; it takes tiny, {', '.join(reg_llm.MODELS)} or a folder, behind a comma "
            f"{', '.join(filter(None, FORMS))}, and behind that "
            f"{' or '.join(f'+{name}' for name in emprl_transformer.BEHIND)}."
        )
    config = random_model(form) if name == "tiny" else adapted(name, form)
    if "tiny" in behind and name != "tiny":
        config = shrink(config)
    return emprl_transformer.add_dailydialog(config) if "dailydialog" in behind else config


def adapted(name: str, form: str) -> ConfigDict:
    """A pretrained model with adapters."""
    config = emprl_transformer.reinforced(reg_llm.get_config(f"{name},sft"), form)
    small = name == "smollm2"
    config.evaluate.update({"buckets": (48, 96), "batch_size": 16, "limit": 2000 if small else 0,
                            "head_examples": 300 if small else 2000})  # fmt: skip
    if "ppo" in config:
        config.ppo.update({"buckets": (48, 96), "max_validation_examples": 100})
        config.ppo.optimizer.learning_rate = 1e-4  # ours: adapters begin at zero and are few
        config.ppo.steps = 150 if small else 1600  # the paper's, where there is room for it
        config.ppo.max_examples = 2_400 if small else 0
        if small:
            config.ppo.batch_size //= 2
            config.ppo.update({"epochs": 2, "log_every_steps": 5, "eval_every_steps": 50, "checkpoint_every_steps": 25,
                               "refresh_every_steps": 50})  # fmt: skip
    return config


def shrink(config: ConfigDict) -> ConfigDict:
    """The same recipe in seconds, if the model is a small one."""
    tokenizer = config.prepare.tokenizer
    config = emprl_transformer.shrink(config)
    config.prepare.tokenizer = tokenizer
    config.emprl.layout.max_context_tokens = 56  # a chat template takes some of them
    config.evaluate.update({"limit": 16, "head_examples": 16})
    return config


def random_model(form: str) -> ConfigDict:
    """A model that knows nothing: its weights are trained, since adapters want weights that know something."""
    config = emprl_transformer.reinforced(reg_transformer.get_config("no_retrieval"), form)
    config = emprl_transformer.shrink(config)
    config.emprl.generator = ConfigDict({"architecture": "llama", "preset": "tiny"})
    config.emprl.layout.max_context_tokens = 56
    return config
