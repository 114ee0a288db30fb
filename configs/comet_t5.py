r"""Our COMET: a T5 that completes everyday events of ATOMIC (Hwang et al. 2021, with a smaller model).

  python -m empax.parts.knowledge.atomic DATA PAIRS                                            # events to pairs, once
  python -m empax.main --config=configs/comet_t5.py --config.data.dir=PAIRS --workdir=runs/comet
  python -m empax.main --config=configs/comet_t5.py:FOLDER --config.data.dir=PAIRS      # any T5 or BART in a folder
  python -m empax.main --config=configs/comet_t5.py:tiny --config.data.dir=PAIRS        # a trial of a random T5
  python -m empax.main --config=configs/comet_t5.py:FOLDER,tiny --config.data.dir=PAIRS # a trial of that model
  python -m empax.export --workdir=runs/comet --output=COMET
  python -m empax.parts.knowledge.quality --data=DATA --model=COMET                   # beside the nearest event

DATA holds ATOMIC's files, in `knowledge/` or directly. The model trains on the dev events (and the training events, if
present); the test events are held out. COMET is then a source of stages of kind "knowledge":
`{"source": "comet", "path": "COMET"}`. Two CPU cores take 50 minutes; docs/results/nec.md has its quality. The budget
of a GPU has not been run.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common

WHEEL = "flan-t5-small-titles"
MACHINES = ("cpu", "gpu")


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "comet_t5.py", models=(WHEEL,), folders=True, machines=MACHINES)
    config = recipe(chosen.model or WHEEL)
    budget(config, chosen.machine or "cpu")
    return shrink(config, random=not chosen.model) if chosen.tiny else config


def recipe(model: str) -> ConfigDict:
    """Returns the recipe for fine-tuning on prompts and tails."""
    config = common.seq2seq(
        model,
        data="jsonl",
        buckets=(16, 32, 48),
        layout={"max_context_tokens": 48, "max_target_tokens": 24},  # 99.9% of prompts and tails are not truncated
        decoding={"method": "beam", "num_beams": 5, "max_tokens": 24},  # COMET-ATOMIC 2020's code: 5 beams
    )
    config.generator = common.train(
        task="generator",
        learning_rate=3e-4,  # ours; COMET-ATOMIC 2020 uses 1e-5 for a BART of 406 million parameters
        buckets=(16, 32, 48),
        emotion_weight=0.0,  # events have no emotion
        best_metric="nll",
        optimizer=common.linear(100),
    )
    return config


def budget(config: ConfigDict, machine: str) -> None:
    """Sets the steps, batches and arithmetic for a machine, one of MACHINES."""
    config.seq2seq.generator.dtype = "bfloat16"
    if machine == "cpu":
        config.generator.update(common.sizes(steps=1900, batch_size=32, evaluations=4))  # an epoch of dev
        # ours: 2,000 random pairs; earlier runs answered the first 2,000
        config.evaluate.update({"batch_size": 32, "limit": 2000})
    else:
        config.generator.update(common.sizes(steps=6000, batch_size=128, evaluations=6))
        config.evaluate.batch_size = 128
        common.on_gpu(config)


def shrink(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Shrinks the recipe to seconds; `random`: with a random small T5, else with the pretrained one."""
    if random:
        config.seq2seq.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
        config.seq2seq.form = "dialogue"  # "plain" is for pretrained models
        config.prepare.tokenizer = ConfigDict({"vocab_size": 600})
    config.seq2seq.decoding.num_beams = 2
    config.generator.update({**common.FEW_STEPS, "batch_size": 8})
    config.generator.optimizer.warmup_steps = 1
    config.evaluate.limit = 16
    return config
