r"""REG on EmpatheticDialogues with the paper's first backbone, a Transformer from scratch.

  python -m empax.main --config=configs/reg_transformer.py --config.data.dir=DATA
  python -m empax.main --config=configs/reg_transformer.py:no_attributes   # the paper's w/o EA
  python -m empax.main --config=configs/reg_transformer.py:no_retrieval    # the generator alone, trained as long
  python -m empax.main --config=configs/reg_transformer.py:apart           # exemplars of the pretrained retriever
  python -m empax.main --config=configs/reg_transformer.py:joined          # the same in the paper's literal layout
  python -m empax.main --config=configs/reg_transformer.py:joined_10       # the same, on a tenth of the rows
  python -m empax.main --config=configs/reg_transformer.py:own_tokens      # or ":response", see data.sources
  python -m empax.main --config=configs/reg_transformer.py:copy            # ours: ":apart" with copying from exemplars
  python -m empax.main --config=configs/reg_transformer.py:knn             # ours: ":no_retrieval" as a kNN-LM
  python -m empax.main --config=configs/reg_transformer.py:contrastive     # ours: its retriever is first trained as DPR
  python -m empax.main --config=configs/reg_transformer.py:reasons         # ours: ReflectDiffu's reasons as queries
  python -m empax.main --config=configs/reg_transformer.py:machine=gpu     # sized for an accelerator
  python -m empax.main --config=configs/reg_transformer.py:tiny            # a trial; also ":no_attributes,tiny"

All forms share the generator, and those with exemplars the index: give the second and later ones `--reuse=WORKDIR` of
one with exemplars (no_attributes and reasons make both again, contrastive the index). After that, all forms train on
the same number of rows.
docs/results/exemplars.md and docs/results/reg.md have scores. Without EPITOME, its attributes are left out and named in
the log.

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

LAYOUTS = {"apart": "apart", "joined": "joined", "joined_10": "joined", "own_tokens": "own_tokens",
           "response": "response"}  # fmt: skip
"""Forms with exemplars but without retriever training, and their layouts."""

NEIGHBOURS = {
    "copy": ("apart", {"copy_weight": 0.01, "copy_temperature": 0.3}),
    "knn": ("no_retrieval", {"knn_weight": 0.1}),
}
"""Forms that interpolate training rows at every token: the base form, and the weights (ours; by `tools.neighbours`)."""

TAGS = 4
"""Attribute tokens before a text."""

FORMS = ("no_retrieval", "no_attributes", "contrastive", "reasons", *LAYOUTS, *NEIGHBOURS)
MACHINES = ("cpu", "gpu")
STAGES = ("generator", "index", "attributes", "annotate", "exemplars", "emotions", "contrastive", "retriever",
          "reindex", "joint")  # fmt: skip


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "reg_transformer.py", forms=FORMS, machines=MACHINES)
    config = recipe("" if chosen.form == "reasons" else chosen.form, chosen.machine or "cpu")
    config = common.shrink(config) if chosen.tiny else config
    if chosen.form == "reasons":
        config.reasons = reflectdiffu.annotator(tiny=chosen.tiny)
        first = ("prepare", "reasons", "generator", "attributes", "annotate", "index")  # queries use reasons
        config.run = (*first, *(name for name in config.run if name not in first))
        config.annotate.reasons = "reasons"
        config.reg.query = "reasons"
    if chosen.machine == "gpu":
        common.on_gpu(config, lengths=2)
    return config


def recipe(form: str, machine: str) -> ConfigDict:
    """Returns the whole system, sized for a machine, or one of FORMS."""
    if form in NEIGHBOURS:
        form, neighbours = NEIGHBOURS[form]
        config = recipe(form, machine)
        config.reg.neighbours = ConfigDict(neighbours)
        return config
    config = common.base(system="reg", data="empathetic_dialogues")
    config.run = tuple(name for name in ("prepare", *STAGES, "evaluate", "swaps", "report") if name != "contrastive")
    config.reg = models()
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"vocab_size": 10_000, "lowercase": True}})
    config.attributes = attributes()
    config.annotate = ConfigDict({"kind": "annotate", "classifiers": ("attributes",)})
    config.index = common.index(encoder="", candidates=12)
    config.generator = generator()
    config.exemplars = exemplars()
    config.emotions = emotions()
    config.retriever = retriever()
    config.reindex = common.index(encoder="retriever", candidates=12)
    config.joint = joint()
    config.evaluate = ConfigDict({"kind": "evaluate", "stage": "joint", "index": "reindex", "judge": "annotate"})
    config.swaps = common.swaps()
    config.report = ConfigDict({"kind": "report", "paper_row": "REG", "peers": ""})
    budget(config, machine)
    ablate(config, form)
    return config


def models() -> ConfigDict:
    """Returns the settings that all stages share."""
    return ConfigDict(
        {
            "generator": common.SCRATCH,
            "retriever": {"pretrained": "minilm", "normalize": True, "dropout": 0.1},
            "layout": {  # ours: 99% of contexts have at most 116 words (LEMPEx: 200 tokens and 50)
                "max_context_tokens": 72,
                "max_passage_tokens": 47,
                "max_target_tokens": 40,
                "max_query_tokens": 64,
                "max_key_tokens": 64,
            },
            "decoding": common.CONSENSUS,
            "attributes": True,
            "exemplars": "apart",  # ours (PAPERS.md): the paper appends each to the context
            "passages": 6,  # Table 5
            "emotion_share": 0.5,  # ours
        }
    )


def attributes() -> ConfigDict:
    """Returns the three classifiers of EPITOME's mechanisms."""
    return common.train(
        task="attributes.classifier",
        data="if_there",  # else they are left out, and named
        encoder={"pretrained": "minilm", "num_layers": 3},
        max_tokens=128,
        buckets=(48, 80, 128),
        hide_response_probability=0.3,  # ours: contexts are classified without their responses
        learning_rate=2e-4,
        best_metric="accuracy",
        best_mode="max",
        optimizer=common.linear(40, groups=[common.FIXED_EMBEDDING]),
    )


def generator() -> ConfigDict:
    """Returns stage 1: G1 (Eq. 2), on contexts alone; the first stage of all forms.

    Its rate falls to a third, not to 0: the next stage goes on from there, and a rise from 0 would lose what it gained.
    After the second stage of `no_retrieval`, the validation loss is 3.507 nats a token and emotions are right for
    39.6%. With a rate that keeps its peak until the second stage decays from there: 3.489 and 37.6% (one seed each,
    results/trials/rates.json).
    """
    return common.train(
        task="generator",
        buckets=(32, 48, 72),
        learning_rate=1e-3,
        best_metric="nll",
        max_validation_examples=1000,
        optimizer={"warmup_steps": 300, "schedule": "rsqrt", "weight_decay": 0.01, "groups": [common.POSITIONS]},
    )


def exemplars() -> ConfigDict:
    """Returns our stage in which G1 learns to read exemplars before it scores them (Eq. 3); the paper has none."""
    return common.train(
        task="joint",
        generator="generator",
        retriever="",
        index="index",
        retriever_weight=0.0,
        exemplar_probability=1.0,
        learning_rate=5e-4,
        best_metric="nll",
        max_validation_examples=1000,
        optimizer=common.linear(50, weight_decay=0.01, groups=[common.frozen("^retriever/")]),
    )


def emotions() -> ConfigDict:
    """Returns our stage for the retriever's emotion head, before distillation."""
    return common.train(
        task="emotions",
        buckets=(32, 48, 64),
        learning_rate=1e-4,
        # ours: on 1,000 random validation contexts; earlier runs used the first 1,000
        best_metric="emotion_accuracy",
        best_mode="max",
        optimizer=common.linear(
            40, groups=[common.FIXED_EMBEDDING, {"pattern": "^emotion/", "learning_rate_scale": 5.0}]
        ),
    )


def contrastive() -> ConfigDict:
    """Returns our stage that trains contexts to retrieve their responses in a batch, before distillation."""
    return common.train(
        task="dense",
        start_from="emotions",
        buckets=(32, 48, 64),
        learning_rate=5e-5,  # as in our recipe of LEMPEx's retriever
        best_metric="loss",
        max_eval_examples=2000,
        optimizer=common.linear(40, groups=[common.FIXED_EMBEDDING, common.frozen("^emotion")]),
    )


def distillation() -> dict:
    """Returns the settings of distillation in stages 2 and 3 (Eq. 3 to 5)."""
    return {
        "signal": "metrics",
        "utility": {"bleu": 1.0, "f1": 1.0, "rouge_l": 1.0},  # Table 2 removes one at a time
        "target_temperature": 0.02,  # ours; tau is not given
        "replace_probability": 0.2,  # ours; k of Eq. 5 is not given
        "emotion_weight": 1.0,  # ours
        "explore_tokens": 20,  # ours
    }


def retriever() -> ConfigDict:
    """Returns stage 2: the retriever is distilled from the utility of its candidates to G1 (Eq. 3 to 5)."""
    return common.train(
        task="retriever",
        generator="exemplars",
        start_from="emotions",
        candidates=6,
        distillation=distillation(),
        learning_rate=2e-6,
        best_metric=None,
        max_validation_examples=500,  # their candidates are tried once more when the stage ends: utility.json
        # The emotion head was trained on far more texts.
        optimizer=common.linear(30, groups=[common.FIXED_EMBEDDING, common.frozen("^emotion")]),
    )


def joint() -> ConfigDict:
    """Returns stage 3: retriever and G2 together (Eq. 6 and 7)."""
    return common.train(
        task="joint",
        generator="exemplars",
        distillation=distillation(),
        warm_up=True,
        retriever_weight=0.2,  # alpha of Eq. 7: ours
        learning_rate=3e-4,
        best_metric="nll",
        optimizer=common.linear(
            30,
            weight_decay=0.01,
            groups=[
                common.FIXED_EMBEDDING,
                common.frozen("^retriever/emotion"),
                {"pattern": "^retriever/", "learning_rate_scale": 0.005},
            ],
        ),
    )


def budget(config: ConfigDict, machine: str) -> None:
    """Sets the steps, batches and arithmetic for a machine, one of MACHINES or "slice" (of TPUs)."""
    if machine == "cpu":
        arithmetic = common.ON_CPU
        config.reg.passages = 3  # halves the time
        sizes = {
            "attributes": common.sizes(steps=400, batch_size=32, evaluations=5),
            "generator": common.sizes(steps=2800, batch_size=32, evaluations=4),
            "exemplars": common.sizes(steps=1200, batch_size=32, evaluations=4),
            "emotions": common.sizes(steps=1300, batch_size=32, evaluations=4),
            "retriever": common.sizes(steps=64, batch_size=16, evaluations=2, accumulate=4),
            "joint": common.sizes(steps=100, batch_size=16, evaluations=2, accumulate=4, refresh_every_steps=50),
        }
        config.evaluate.batch_size = 32
    else:
        arithmetic = {"dtype": "bfloat16", **({} if machine == "gpu" else {"remat": "full"})}
        sizes = {
            "attributes": common.sizes(steps=800, batch_size=32, evaluations=10),
            "generator": common.sizes(steps=3000, batch_size=64, evaluations=4),
            "exemplars": common.sizes(steps=3000, batch_size=64, evaluations=4),
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
        index.queries = ConfigDict({"train": 0, "validation": 1000})  # every training context


def ablate(config: ConfigDict, form: str) -> None:
    """Changes the whole system to one of FORMS."""
    if form == "no_attributes":
        # Also removes our use of emotions in the retriever: their share of a score, their stage and their loss. The
        # classifiers remain as judges.
        config.run = tuple(name for name in config.run if name != "emotions")
        config.retriever.start_from = ""
        config.retriever.distillation.emotion_weight = 0.0
        config.joint.distillation.emotion_weight = 0.0
        config.reg.update({"attributes": False, "emotion_share": 0.0})
    if form == "contrastive":
        # Before the index, so that the generator learns to read the exemplars that the trained retriever finds.
        first = ("prepare", "generator", "emotions", "contrastive", "index")
        config.run = (*first, *(name for name in config.run if name not in first))
        config.index.encoder = config.exemplars.retriever = "contrastive"
        config.contrastive = contrastive()
        config.contrastive.update(common.sizes(steps=config.emotions.steps, batch_size=64, evaluations=4))
        config.retriever.start_from = "contrastive"
        config.reg.key = "response"  # an exchange contains its own query
    if form in LAYOUTS or form == "no_retrieval":
        # No stage produces attributes or trains emotions, so sources and scores have none.
        config.run = ("prepare", "generator", "index", "exemplars", "evaluate", "swaps", "report")
        rows = config.joint.steps * config.joint.batch_size  # as many as the whole system trains on
        config.exemplars.steps += rows // config.exemplars.batch_size
        config.evaluate.update({"stage": "exemplars", "index": "index", "judge": ""})
    if form in LAYOUTS:
        config.reg.exemplars = LAYOUTS[form]
        config.exemplars.exemplar_probability = 0.1 if form == "joined_10" else 1.0
    if form == "no_retrieval":
        config.run = ("prepare", "generator", "longer", "evaluate", "report")
        config.longer = longer(config)
        config.evaluate.update({"stage": "longer", "index": ""})
    for name in (*STAGES, "swaps"):
        if name in config and name not in config.run:
            del config[name]
    read(config)


def longer(config: ConfigDict) -> ConfigDict:
    """Returns further training of the generator without exemplars, on as many rows as other forms use with them."""
    optimizer = config.exemplars.optimizer.copy_and_resolve_references()
    del optimizer.groups
    rhythm = ("steps", "batch_size", "eval_every_steps", "checkpoint_every_steps", "log_every_steps")
    same = {name: config.exemplars[name] for name in (*rhythm, "best_metric", "max_validation_examples")}
    return ConfigDict({"kind": "train", "task": "generator", "start_from": "generator", "optimizer": optimizer, **same})


def read(config: ConfigDict) -> None:
    """Sets the buckets of every stage that reads sources to the lengths of the layout."""
    layout, exemplars = config.reg.layout, config.reg.exemplars in ("apart", "response")
    tags = TAGS if "annotate" in config.run and config.reg.attributes else 0
    ends = 1 if config.reg.generator.get("pretrained") else 0
    context, passage = layout.max_context_tokens + tags, layout.max_passage_tokens + tags
    whole = max(context, passage) + ends if exemplars else context + 1 + passage + ends
    beside = (passage + ends, whole) if exemplars and passage < context else (-(-3 * whole // 4), whole)
    # The same in all forms, which share this stage.
    config.generator.buckets = (*config.generator.buckets[:-1], layout.max_context_tokens + TAGS + ends)
    for name in ("exemplars", "retriever", "joint", "evaluate"):
        if name in config:
            config[name].buckets = beside
    if "longer" in config:
        config.longer.buckets = config.evaluate.buckets = config.generator.buckets
