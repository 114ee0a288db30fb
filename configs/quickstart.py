r"""REG in small on the built-in sample: every stage, minutes on two CPU cores, nothing to download.

make quickstart
python -m empax.main --config=configs/quickstart.py
python -m empax.main --config=configs/quickstart.py:tiny     # random encoders too: seconds, for tests
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import common


def get_config(arg: str = "") -> ConfigDict:
    if arg not in ("", "tiny"):
        raise ValueError(f"configs/quickstart.py:{arg} is unknown; it takes ':tiny' or nothing.")
    tiny = arg == "tiny"
    config = common.base(system="reg", data="sample")
    config.run = ("prepare", "attributes", "annotate", "index", "generator", "retriever", "reindex", "joint",
                  "evaluate", "report")  # fmt: skip
    encoder = {"pretrained": "" if tiny else "minilm", "num_layers": 2, "normalize": True}
    config.reg = ConfigDict(
        {
            "generator": {
                "d_model": 32 if tiny else 128,
                "num_heads": 2,
                "head_dim": 16 if tiny else 64,
                "d_ff": 64 if tiny else 384,
                "num_encoder_layers": 2,
                "num_decoder_layers": 2,
            },
            "retriever": encoder,
            "layout": {
                "max_context_tokens": 64,
                "max_passage_tokens": 48,
                "max_target_tokens": 32,
                "max_query_tokens": 64,
                "max_key_tokens": 64,
            },
            "decoding": {"method": "beam", "num_beams": 2, "max_tokens": 24, "no_repeat_ngram": 3},
            "passages": 2 if tiny else 4,
        }
    )
    config.prepare = {"kind": "prepare", "tokenizer": {"vocab_size": 600 if tiny else 3000}}
    few = 4 if tiny else 0
    rhythm = {"log_every_steps": 2, "eval_every_steps": 4, "checkpoint_every_steps": 4} if tiny else {
        "log_every_steps": 20, "eval_every_steps": 50, "checkpoint_every_steps": 100}  # fmt: skip
    config.attributes = common.train(
        task="attributes.classifier", steps=few or 60, batch_size=8 if tiny else 32, learning_rate=1e-4,
        buckets=(128,), data="sample", encoder=encoder, best_metric="accuracy", best_mode="max", **rhythm,
    )  # fmt: skip
    config.annotate = {"kind": "annotate", "classifiers": ("attributes",)}
    config.index = {"kind": "index", "encoder": "", "store": {"method": "scann"}, "candidates": 8}
    config.generator = common.train(
        task="generator", steps=few or 300, batch_size=8 if tiny else 32, learning_rate=1e-3, buckets=(128,),
        index="index", best_metric="nll", **rhythm, optimizer={"warmup_steps": 2 if tiny else 50},
    )  # fmt: skip
    distillation = {"score_temperature": 0.1, "explore_tokens": 16, "emotion_weight": 0.5}
    config.retriever = common.train(
        task="retriever", steps=few or 40, batch_size=8 if tiny else 16, learning_rate=5e-5, buckets=(128,),
        distillation=distillation, best_metric=None, **rhythm,
        optimizer={"groups": [{"pattern": "^emotion/", "learning_rate_scale": 20.0}]},
    )  # fmt: skip
    config.reindex = {"kind": "index", "encoder": "retriever", "store": {"method": "scann"}, "candidates": 8}
    config.joint = common.train(
        task="joint", steps=few or 60, batch_size=8, learning_rate=3e-4, buckets=(128,), distillation=distillation,
        best_metric="nll", refresh_every_steps=2 if tiny else 30, **rhythm,
        optimizer={"groups": [{"pattern": "^retriever/", "learning_rate_scale": 0.1}]},
    )  # fmt: skip
    config.evaluate = {
        "kind": "evaluate",
        "stage": "joint",
        "index": "reindex",
        "buckets": (128,),
        "batch_size": 16,
        "judge": "annotate",
    }
    config.report = {"kind": "report"}
    return config
