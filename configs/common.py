"""What recipes share: the sections that every run has, and how to shrink them."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict


def base(*, system: str, data: str, seed: int = 0) -> ConfigDict:
    """An empty recipe: system, data, seed."""
    config = ConfigDict()
    config.system = system
    config.seed = seed
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})  # -1: all devices that the other two leave
    # Of --mode=plan: "v5e:16x16", "v5p:4x4x4", ...; which training stages, all of them if empty.
    config.plan = ConfigDict({"topology": "", "stages": ()})
    config.profile = False  # True: each training stage traces a few updates and prints what took longest
    config.data = ConfigDict({"name": data, "dir": "", "moel_compat": False, "limit": 0})
    return config


def train(*, task: str, steps: int, batch_size: int, learning_rate: float, **more: Any) -> ConfigDict:
    """A training stage; `more` are settings of the loop or of the task."""
    optimizer = {"learning_rate": learning_rate, "clip_norm": 1.0, **more.pop("optimizer", {})}
    return ConfigDict(
        {"kind": "train", "task": task, "steps": steps, "batch_size": batch_size, "optimizer": optimizer, **more},
        convert_dict=True,
    )


FIXED_EMBEDDING = {"pattern": "encoder/token_embedding$", "frozen": True}
"""A parameter group for pretrained encoders: half of MiniLM is word embeddings, and few steps change them little."""


def index(*, encoder: str, candidates: int, queries: dict[str, int], method: str = "scann") -> ConfigDict:
    """An index stage; `encoder` is the stage that trained it, empty = as pretrained."""
    return ConfigDict(
        {"kind": "index", "encoder": encoder, "store": {"method": method}, "candidates": candidates, "queries": queries}
    )


def shrink(config: ConfigDict) -> ConfigDict:
    """The same recipe in seconds: the built-in sample, random small models, a few steps."""
    config.data.name = "sample"
    models = config[config.system]
    small = {"d_model": 32, "num_heads": 2, "d_ff": 64}
    models.generator.update(
        {**small, "head_dim": 16, "num_encoder_layers": 2, "num_decoder_layers": 2, "unroll": 1, "embeddings": ""}
    )
    models.retriever = ConfigDict({**small, "num_layers": 2, "normalize": True, "dropout": 0.0})
    models.decoding = ConfigDict({"method": "greedy", "max_tokens": 12})
    # One length everywhere: most of a trial's time is compiling, once for every shape.
    models.layout.update({"max_context_tokens": 32, "max_passage_tokens": 32, "max_target_tokens": 16,
                              "max_query_tokens": 16, "max_key_tokens": 16})  # fmt: skip
    models.passages = 2
    config.prepare.tokenizer = ConfigDict({"vocab_size": 600})
    for name in config.run:
        section = config[name]
        if section.kind == "train":
            section.update({"steps": 4, "batch_size": 8, "accumulate": 1, "log_every_steps": 2, "eval_every_steps": 2,
                            "checkpoint_every_steps": 2, "buckets": (80,)})  # fmt: skip
            if "refresh_every_steps" in section:
                section.refresh_every_steps = 2
        if section.kind == "index":
            section.update({"candidates": 4, "queries": {"train": 0, "validation": 0}})
    if "attributes" in config:
        config.attributes.update({"data": "sample", "encoder": ConfigDict({**small, "num_layers": 2}), "max_tokens": 16,
                                  "buckets": (16,)})  # fmt: skip
    config.evaluate.update({"buckets": (80,), "batch_size": 16})
    return config
