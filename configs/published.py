r"""The adapters that empax publishes in weights/: LoRA on all linear layers of a small pretrained model.

  python -m empax.main --config=configs/published.py:empathetic-t5-small --config.data.dir=DATA --workdir=WORKDIR
  python -m empax.main --config=configs/published.py:empathetic-smollm2 --config.data.dir=DATA --workdir=WORKDIR
  python -m tools.publish --workdir=WORKDIR --output=weights/NAME
  python -m empax.main --config=configs/published.py:empathetic-t5-small,tiny     # a trial: four steps

The source has the format of `empax.load(...).reply(turns)`: turns joined by " | " for a T5, a chat of user and
assistant for SmolLM2. Adapters in bfloat16 take at most 8 MB, which rank 16 of SmolLM2 would exceed.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common

BASES = {
    "empathetic-t5-small": ("flan-t5-small-titles", {"rank": 16, "alpha": 32.0}, {"steps": 2520, "batch_size": 16}),
    "empathetic-smollm2": ("smollm2", {"rank": 12, "alpha": 24.0}, {"steps": 2520, "batch_size": 16}),
}
"""Published names: the base model, the adapters, and the training size: one epoch of 40,290 replies."""


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "published.py", models=tuple(BASES))
    if not chosen.model:
        raise ValueError(f"published needs a name; write published:{' or published:'.join(BASES)}.")
    base, lora, learnt = BASES[chosen.model]
    chat = base == "smollm2"  # its template takes 30 tokens
    config = common.seq2seq(
        base,
        data="empathetic_dialogues",
        buckets=(128,) if chat else (32, 96),
        layout={"max_context_tokens": 128 if chat else 96, "max_target_tokens": 48},
        lora=lora,
        decoding=common.CONSENSUS if chat else common.T5_CONSENSUS,
    )
    if chat:
        # All 30 layers unrolled: in a loop, each layer would convert the saved activations of all others.
        config.seq2seq.generator.update({"dtype": "bfloat16", "unroll": 30})
        config.evaluate.limit = 500  # all 5,249 rows take over an hour
    # Adapters are so small that dropout costs more than it saves in overfitting.
    config.seq2seq.generator.dropout = 0.0
    config.evaluate.batch_size = 16
    config.generator = common.train(
        task="generator",
        **common.sizes(**learnt, evaluations=5, max_validation_examples=200 if chat else 500),
        learning_rate=1e-3,
        buckets=(64, 96, 128) if chat else (32, 64, 96),
        emotion_weight=0.0,
        best_metric="nll",
        optimizer=common.linear(50, weight_decay=0.0),
    )
    if chosen.tiny:
        config.data.name = "sample"
        config.seq2seq.decoding = ConfigDict({"method": "greedy", "max_tokens": 12})
        config.seq2seq.generator.update({"dtype": "float32", "unroll": 1})
        config.generator.update({**common.FEW_STEPS, "batch_size": 8, "buckets": (128,), "max_validation_examples": 8})
        config.evaluate.update({"buckets": (128,), "limit": 16})
    return config
