r"""REG on EmpatheticDialogues with the paper's first backbone, a Transformer from scratch.

  python -m empax.main --config=configs/reg_transformer.py --config.data.dir=DATA
  python -m empax.main --config=configs/reg_transformer.py:no_attributes   # the paper's w/o EA
  python -m empax.main --config=configs/reg_transformer.py:no_retrieval    # the generator alone
  python -m empax.main --config=configs/reg_transformer.py:semantic        # no attributes, retriever as pretrained
  python -m empax.main --config=configs/reg_transformer.py:reasons         # ours: ReflectDiffu's reasons as queries
  python -m empax.main --config=configs/reg_transformer.py:machine=gpu     # sized for an accelerator
  python -m empax.main --config=configs/reg_transformer.py:tiny            # a trial, as ":no_attributes,tiny" is

Two CPU cores take 1.4 hours; docs/results/reg.md has scores. The budget of a GPU has never been run.

Other ablations of the paper's Table 2 are switches:
  w/o BLEU    --config.retriever.distillation.utility.bleu=0 --config.joint.distillation.utility.bleu=0
  w/o F1      ... utility.f1=0
  w/o R-L     ... utility.rouge_l=0
  w/o RCA     ... distillation.replace_probability=0
  G1+RAG      ... distillation.signal=likelihood
  scratch     --config.joint.warm_up=False
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common, reflectdiffu

FORMS = ("semantic", "no_retrieval", "no_attributes", "reasons")
MACHINES = ("cpu", "gpu")
STAGES = ("attributes", "annotate", "index", "generator", "emotions", "retriever", "reindex", "joint")


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "reg_transformer.py", forms=FORMS, machines=MACHINES)
    config = recipe("" if chosen.form == "reasons" else chosen.form, chosen.machine or "cpu")
    config = common.shrink(config) if chosen.tiny else config
    if chosen.form == "reasons":
        config.reasons = reflectdiffu.annotator(tiny=chosen.tiny)
        config.run = ("prepare", "reasons", *config.run[1:])
        config.annotate.reasons = "reasons"
        config.reg.query = "reasons"
    return config


def recipe(form: str, machine: str) -> ConfigDict:
    """The whole system, sized for a machine, or one of FORMS."""
    config = common.base(system="reg", data="empathetic_dialogues")
    config.run = ("prepare", *STAGES, "evaluate", "report")
    config.reg = models()
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"vocab_size": 10_000, "lowercase": True}})
    config.attributes = attributes()
    config.annotate = ConfigDict({"kind": "annotate", "classifiers": ("attributes",)})
    config.index = common.index(encoder="", candidates=12)
    config.generator = generator()
    config.emotions = emotions()
    config.retriever = retriever()
    config.reindex = common.index(encoder="retriever", candidates=12)
    config.joint = joint()
    config.evaluate = ConfigDict({"kind": "evaluate", "stage": "joint", "index": "reindex", "judge": "annotate"})
    config.evaluate.buckets = (64, 96, 128)
    config.report = ConfigDict({"kind": "report", "paper_row": "REG", "peers": ""})
    budget(config, machine)
    ablate(config, form)
    return config


def models() -> ConfigDict:
    """What all stages share."""
    return ConfigDict(
        {
            "generator": {
                "d_model": 256,
                "num_heads": 4,
                "head_dim": 64,
                "d_ff": 1024,
                # The encoder reads K passages where the decoder reads one response: depth is cheaper below.
                "num_encoder_layers": 3,
                "num_decoder_layers": 4,
                "dropout": 0.1,
                "embeddings": "minilm",
            },
            "retriever": {
                "pretrained": "minilm",
                "normalize": True,
                "dropout": 0.1,
            },
            "layout": {  # ours: 99% of contexts have at most 116 words (LEMPEx reads 200 tokens and 50)
                "max_context_tokens": 72,
                "max_passage_tokens": 47,
                "max_target_tokens": 40,
                "max_query_tokens": 64,
                "max_key_tokens": 64,
            },
            "decoding": {  # ours, by validation (PAPERS.md): what samples agree on, about as long as people's replies
                "method": "sample",
                "num_samples": 16,
                "temperature": 0.57,
                "rerank": "consensus",
                "rerank_length": 0.35,
                "rerank_exemplars": 1.0,
                "max_tokens": 30,
                "no_repeat_ngram": 3,
            },
            "attributes": True,
            "passages": 6,  # Table 5
            "emotion_share": 0.5,  # ours
        }
    )


def attributes() -> ConfigDict:
    """The three classifiers of EPITOME's mechanisms."""
    return common.train(
        task="attributes.classifier",
        encoder={"pretrained": "minilm", "num_layers": 3},
        max_tokens=128,
        buckets=(48, 80, 128),
        hide_response_probability=0.3,  # ours: contexts are judged without their responses
        learning_rate=2e-4,
        best_metric="accuracy",
        best_mode="max",
        optimizer={"warmup_steps": 40, "schedule": "linear", "groups": [common.FIXED_EMBEDDING]},
    )


def generator() -> ConfigDict:
    """Stage 1: G1 (Eq. 2)."""
    return common.train(
        task="generator",
        index="index",
        exemplar_probability=0.5,  # ours: G1 is later shown one exemplar, and REG w/o retrieval none
        buckets=(32, 64, 112),
        learning_rate=1e-3,
        best_metric="nll",
        max_validation_examples=1000,
        optimizer={"warmup_steps": 300, "schedule": "linear", "weight_decay": 0.01},
    )


def emotions() -> ConfigDict:
    """Ours: the retriever's emotion head, before it is distilled."""
    return common.train(
        task="emotions",
        buckets=(32, 48, 64),
        learning_rate=1e-4,
        # ours: of 1,000 validation contexts drawn at random; what has run so far was chosen on the first 1,000
        best_metric="emotion_accuracy",
        best_mode="max",
        optimizer={
            "warmup_steps": 40,
            "schedule": "linear",
            "groups": [common.FIXED_EMBEDDING, {"pattern": "^emotion/", "learning_rate_scale": 5.0}],
        },
    )


def distillation() -> dict:
    """Of stages 2 and 3 (Eq. 3 to 5)."""
    return {
        "signal": "metrics",
        "utility": {"bleu": 1.0, "f1": 1.0, "rouge_l": 1.0},  # Table 2 takes away one at a time
        "target_temperature": 0.02,  # ours; tau is not given
        "score_temperature": 0.1,  # ours: cosines lie close together
        "replace_probability": 0.2,  # ours; k of Eq. 5 is not given
        "emotion_weight": 1.0,  # ours
        "explore_tokens": 20,  # ours
    }


def retriever() -> ConfigDict:
    """Stage 2: the retriever learns from what its candidates do for G1 (Eq. 3 to 5)."""
    return common.train(
        task="retriever",
        start_from="emotions",
        candidates=6,
        buckets=(96, 128),
        distillation=distillation(),
        learning_rate=2e-6,
        best_metric=None,
        optimizer={
            "warmup_steps": 30,
            "schedule": "linear",
            # The emotion head has learnt from far more texts.
            "groups": [common.FIXED_EMBEDDING, {"pattern": "^emotion", "frozen": True}],
        },
    )


def joint() -> ConfigDict:
    """Stage 3: retriever and G2 together (Eq. 6 and 7)."""
    return common.train(
        task="joint",
        buckets=(96, 128),
        distillation=distillation(),
        warm_up=True,
        retriever_weight=0.2,  # alpha of Eq. 7: ours
        learning_rate=3e-4,
        best_metric="nll",
        optimizer={
            "warmup_steps": 30,
            "schedule": "linear",
            "weight_decay": 0.01,
            "groups": [
                common.FIXED_EMBEDDING,
                {"pattern": "^retriever/emotion", "frozen": True},
                {"pattern": "^retriever/", "learning_rate_scale": 0.005},
            ],
        },
    )


def budget(config: ConfigDict, machine: str) -> None:
    """Steps, batches and arithmetic: what depends on the machine, one of MACHINES."""
    if machine == "cpu":
        # A quarter to a half of the time of float32 in a plain scan.
        arithmetic = {"dtype": "bfloat16", "unroll": 6}
        queries = {"train": 8_000, "validation": 500}
        sizes = {
            "attributes": common.sizes(steps=400, batch_size=32, evaluations=5),
            "generator": common.sizes(steps=2800, batch_size=32, evaluations=4),
            "emotions": common.sizes(steps=1300, batch_size=32, evaluations=4),
            "retriever": common.sizes(steps=64, batch_size=16, evaluations=2, accumulate=4),
            "joint": common.sizes(steps=100, batch_size=16, evaluations=2, accumulate=4, refresh_every_steps=50),
        }
        config.evaluate.batch_size = 32
    else:
        arithmetic = {"dtype": "bfloat16", "remat": "full"}
        queries = {"train": 0, "validation": 1000}  # every training context
        sizes = {
            "attributes": common.sizes(steps=800, batch_size=32, evaluations=10),
            "generator": common.sizes(steps=6000, batch_size=64, evaluations=8),
            "emotions": common.sizes(steps=1300, batch_size=64, evaluations=4),
            "retriever": common.sizes(steps=1500, batch_size=32, evaluations=6),
            "joint": common.sizes(steps=4000, batch_size=32, evaluations=8, refresh_every_steps=1000),
        }
        config.evaluate.batch_size = 64
    for model in (config.reg.generator, config.reg.retriever, config.attributes.encoder):
        model.update(arithmetic)
    for name, size in sizes.items():
        config[name].update(size)
    for index in (config.index, config.reindex):
        index.queries = ConfigDict(queries)


def ablate(config: ConfigDict, form: str) -> None:
    """Turns the whole system into one of FORMS."""
    if form == "semantic":
        config.run = ("prepare", "index", "generator", "joint", "evaluate", "report")
        config.reg.retriever.dropout = 0.0  # of what is never trained
        config.joint.update({"retriever": "", "index": "index", "retriever_weight": 0.0, "refresh_every_steps": 0})
        config.joint.distillation.replace_probability = 0.0
        config.joint.optimizer.groups = [{"pattern": "^retriever/", "frozen": True}]
        config.evaluate.update({"index": "index", "judge": ""})
    if form == "no_retrieval":
        config.run = ("prepare", "generator", "evaluate", "report")
        config.reg.retriever.dropout = 0.0
        config.reg.decoding.rerank_exemplars = 0.0
        config.generator.index = ""
        # As many examples as G1 and G2 learn from.
        config.generator.steps += config.joint.steps * config.joint.batch_size // config.generator.batch_size
        config.evaluate.update({"stage": "generator", "judge": ""})
    if form == "no_attributes":
        # What is ours and lets emotions into the retriever goes, too: the share of a score, the stage that learns
        # emotions, their loss. The classifiers stay, to judge.
        config.run = tuple(name for name in config.run if name != "emotions")
        config.retriever.start_from = ""
        config.retriever.distillation.emotion_weight = 0.0
        config.joint.distillation.emotion_weight = 0.0
    if form:
        config.reg.update({"attributes": False, "emotion_share": 0.0})
    for name in STAGES:
        if name not in config.run:
            del config[name]
