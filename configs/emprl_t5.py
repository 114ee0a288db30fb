r"""EmpRL on a fine-tuned T5, its own backbone.

  python -m empax.main --config=configs/emprl_t5.py --config.data.dir=DATA          # sized for two CPU cores
  python -m empax.main --config=configs/emprl_t5.py:flan-t5-small-titles,sft ...    # the paper's "w/o RL"
  python -m empax.main --config=configs/emprl_t5.py:flan-t5-small-titles,expected ...  # no_kl, grpo, ...
  python -m empax.main --config=configs/emprl_t5.py:flan-t5-small-titles+dailydialog ...  # and small talk
  python -m empax.main --config=configs/emprl_t5.py:flan-t5-small-titles,grpo+tiny  # a trial on the built-in sample
  python -m empax.main --config=configs/emprl_t5.py:tiny                            # a trial with a random T5

The model is that of configs/reg_t5.py, and so is its fine-tuning: `--reuse=WORKDIR` of a run of that recipe takes it
over. Identifiers and rewards are those of configs/emprl_transformer.py.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import emprl_transformer, reg_t5

NAMES = (reg_t5.WHEEL, "tiny")
FORMS = ("", "expected", "sft", "no_kl", "no_reward", "grpo", "trajectory")


def get_config(arg: str = reg_t5.WHEEL) -> ConfigDict:
    head, *behind = arg.split("+")
    name, _, form = head.partition(",")
    if name not in NAMES or form not in FORMS or not set(behind) <= set(emprl_transformer.BEHIND):
        raise ValueError(
            f"emprl_t5.py:{arg} is unknown; it takes {' or '.join(NAMES)}, behind a comma "
            f"{', '.join(filter(None, FORMS))}, and behind that "
            f"{' or '.join(f'+{name}' for name in emprl_transformer.BEHIND)}."
        )
    house = reg_t5.get_config(f"{reg_t5.WHEEL},no_retrieval")
    config = emprl_transformer.reinforced(house, form)
    # Fine-tuning first, as in REG's recipe: so that a run of either begins with what the other has fine-tuned.
    first = ("prepare", "generator")
    config.run = (*first, *(stage for stage in config.run if stage not in first))
    config.evaluate.update({"buckets": house.evaluate.buckets, "batch_size": 16})
    if "ppo" in config:
        config.ppo.update({"buckets": house.generator.buckets, "max_validation_examples": 500})
        config.ppo.optimizer.learning_rate = 5e-5  # ours: it knows more than one from scratch, and has more to forget
    if name == "tiny":
        generator = reg_t5.get_config("tiny").reg.generator
        config = emprl_transformer.shrink(config)
        config.emprl.generator = generator
    elif "tiny" in behind:
        config = shrink(config)
    return emprl_transformer.add_dailydialog(config) if "dailydialog" in behind else config


def shrink(config: ConfigDict) -> ConfigDict:
    """The same recipe in seconds, on the pretrained model."""
    generator, tokenizer = config.emprl.generator, config.prepare.tokenizer
    generator, tokenizer = (part.copy_and_resolve_references() for part in (generator, tokenizer))
    config = emprl_transformer.shrink(config)
    config.emprl.generator, config.prepare.tokenizer = generator, tokenizer
    config.evaluate.update({"limit": 16, "head_examples": 16})
    return config
