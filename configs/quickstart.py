r"""REG in small on the built-in sample: every stage, minutes on two CPU cores, nothing to download.

make quickstart
python -m empax.main --config=configs/quickstart.py
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "quickstart.py")
    config = common.base(system="reg", data="sample")
    config.run = ("prepare", "attributes", "annotate", "index", "generator", "retriever", "reindex", "joint",
                  "evaluate", "report")  # fmt: skip
    encoder = {"pretrained": "minilm", "num_layers": 2, "normalize": True, "unroll": 2}
    config.reg = ConfigDict(
        {
            "generator": {
                "d_model": 128,
                "num_heads": 2,
                "head_dim": 64,
                "d_ff": 384,
                "num_encoder_layers": 2,
                "num_decoder_layers": 2,
                "unroll": 2,
            },
            "retriever": encoder,
            "layout": {
                "max_context_tokens": 48,
                "max_passage_tokens": 39,
                "max_target_tokens": 32,
                "max_query_tokens": 48,
                "max_key_tokens": 64,
            },
            "decoding": {"method": "beam", "num_beams": 2, "max_tokens": 24, "no_repeat_ngram": 3},
            "passages": 3,
        }
    )
    # One bucket and few other shapes: most of so short a run would be compilation.
    rhythm = {"log_every_steps": 20, "eval_every_steps": 50, "checkpoint_every_steps": 100, "buckets": (96,)}
    config.prepare = {"kind": "prepare", "tokenizer": {"vocab_size": 3000}}
    config.attributes = common.train(
        task="attributes.classifier", steps=50, batch_size=16, learning_rate=2e-4, data="sample", encoder=encoder,
        max_tokens=64, best_metric="accuracy", best_mode="max", **{**rhythm, "buckets": (64,)},
        optimizer={"groups": [common.FIXED_EMBEDDING]},
    )  # fmt: skip
    config.annotate = {"kind": "annotate", "classifiers": ("attributes",)}
    config.index = common.index(encoder="", candidates=6, queries={"train": 0, "validation": 0})
    config.generator = common.train(
        task="generator", steps=160, batch_size=32, learning_rate=1e-3, index="index", best_metric="nll", **rhythm,
        optimizer={"warmup_steps": 50},
    )  # fmt: skip
    distillation = {"score_temperature": 0.1, "explore_tokens": 16, "emotion_weight": 0.5}
    config.retriever = common.train(
        task="retriever", steps=24, batch_size=8, learning_rate=5e-5, distillation=distillation, candidates=3,
        best_metric=None, **rhythm,
        optimizer={"groups": [common.FIXED_EMBEDDING, {"pattern": "^emotion/", "learning_rate_scale": 20.0}]},
    )  # fmt: skip
    config.reindex = common.index(encoder="retriever", candidates=6, queries={"train": 0, "validation": 0})
    config.joint = common.train(
        task="joint", steps=30, batch_size=8, learning_rate=3e-4, distillation=distillation, best_metric="nll",
        refresh_every_steps=15, **rhythm,
        optimizer={"groups": [common.FIXED_EMBEDDING, {"pattern": "^retriever/", "learning_rate_scale": 0.1}]},
    )  # fmt: skip
    config.evaluate = {"kind": "evaluate", "stage": "joint", "buckets": (96,), "batch_size": 16, "judge": "annotate"}
    config.report = {"kind": "report"}
    return common.shrink(config) if chosen.tiny else config
