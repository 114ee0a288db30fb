r"""NEC on EmpatheticDialogues (Huangfu et al. 2025): commonsense, and contrast with four kinds of candidates.

  python -m empax.main --config=configs/nec.py:scratch --config.data.dir=DATA      # a Transformer from scratch
  python -m empax.main --config=configs/nec.py --config.data.dir=DATA              # FLAN-T5-small
  python -m empax.main --config=configs/nec.py:bart --config.data.dir=DATA         # the paper's, sized for a GPU
  python -m empax.main --config=configs/nec.py:no_contrast --config.data.dir=DATA  # likelihood alone: DCKS's form
  python -m empax.main --config=configs/nec.py:no_entity --config.data.dir=DATA    # Table 4: w/o Entity
  python -m empax.main --config=configs/nec.py:no_social --config.data.dir=DATA    # w/o Social
  python -m empax.main --config=configs/nec.py:no_self --config.data.dir=DATA      # w/o SelfGen
  python -m empax.main --config=configs/nec.py:no_frequent --config.data.dir=DATA  # w/o HighFreq
  python -m empax.main --config=configs/nec.py:no_emotion --config.data.dir=DATA   # w/o DiffEmo
  python -m empax.main --config=configs/nec.py:no_rerank --config.data.dir=DATA    # alpha = 0: the order of the search
  python -m empax.main --config=configs/nec.py:random_beam --config.data.dir=DATA  # control: any of the five beams
  python -m empax.main --config=configs/nec.py:shuffled --config.data.dir=DATA     # control: tails of others
  python -m empax.main --config=configs/nec.py:ranker --config.data.dir=DATA       # with the ranker of Sec. 3.2
  python -m empax.main --config=configs/nec.py:consensus --config.data.dir=DATA    # by the leaderboard's decoder
  python -m empax.main --config=configs/nec.py:tiny                                # a trial on the built-in sample

Forms can be combined: ":scratch,no_social,tiny". With --reuse=WORKDIR a form reuses shared stages of a finished run.
"machine=cpu" and "machine=gpu" size a run; FLAN-T5-small and the Transformer are sized for two CPU cores by default.
Facts about people are those of the nearest event of ATOMIC (DATA/knowledge), facts about things WordNet's (Debian's
package wordnet-base; another folder is `--config.knowledge.entity.path`). With a COMET (configs/comet_t5.py):
`--config.knowledge.social.source=comet --config.knowledge.social.path=COMET`.
":scratch,machine=gpu" took 8 minutes on a shared H200 with existing facts: perplexity 36.6 per token, BLEU-2 7.8
(docs/results/nec.md). The other budgets have not been run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from . import common

WHEEL = "flan-t5-small-titles"
MODELS = ("t5", "scratch", "bart")
FORMS = ("no_contrast", "no_entity", "no_social", "no_self", "no_frequent", "no_emotion", "no_rerank",
         "random_beam", "shuffled", "ranker")  # fmt: skip
MACHINES = ("cpu", "gpu")
BUCKETS = (64, 96, 144)
OUTPUT = {"pattern": "/social/attention/out$", "learning_rate_scale": 8.0}
"""A parameter group for the output of the attention to facts about people in a pretrained T5; ours.

In FLAN-T5-small the states of the decoder's layers have a root mean square of 12 to 270, and the output weights of its
own attention one of .4 to 1.8. New ones begin at .05, and Adam moves an entry by at most the learning rate in an
update: at the plain rate, the 1,250 updates of a CPU would leave them so small that facts would not be read.
"""
GROUPS = {"scratch": [common.POSITIONS], "t5": [OUTPUT], "bart": []}
"""Parameter groups of the generator, by model."""


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "nec.py", models=MODELS, flags=(*FORMS, "consensus", "tiny"), machines=MACHINES)
    model = chosen.model or "t5"
    config = recipe(model)
    budget(config, model, chosen.machine or ("gpu" if model == "bart" else "cpu"))
    forms = [form for form in FORMS if form in chosen.flags]
    common.check_together(arg, "nec.py", tuple(forms), read)
    for form in forms:
        change(config, form)
    leave_out_unread(config)
    if "consensus" in chosen.flags and (idle := {"no_rerank", "random_beam"} & set(forms)):
        raise ValueError(f"nec.py:{arg}: {' and '.join(sorted(idle))} choose among beams, and consensus among samples.")
    decoding = common.T5_CONSENSUS if model == "t5" else common.CONSENSUS
    return common.decode_alike(shrink(config, model) if chosen.tiny else config, chosen, decoding)


def read(forms: Sequence[str]) -> ConfigDict:
    """Returns the recipe with `forms`, without sections that are then unused."""
    config = recipe("scratch")
    budget(config, "scratch", "cpu")
    for form in forms:
        change(config, form)
    leave_out_unread(config)
    decoding = config.evaluate.get("decoding", config.nec.decoding)
    if "rerank_similarity" in decoding:
        if decoding.rerank == "similarity" and not decoding.rerank_similarity:
            decoding.rerank = ""
        del decoding.rerank_similarity
    return config


def leave_out_unread(config: ConfigDict) -> None:
    """Removes unused facts with their ranker and parameter group, and the names of missing stages."""
    if not config.nec.entity and config.nec.ranker:
        config.nec.ranker = ""
        del config.ranker
    if not (config.nec.entity or config.nec.social):
        del config.knowledge
    for name in ("generator", "contrastive"):
        if name in config and not config.nec.social:
            optimizer = config[name].optimizer
            optimizer.groups = [one for one in optimizer.groups if one["pattern"] != OUTPUT["pattern"]]
    config.run = tuple(name for name in config.run if name in config)


def recipe(model: str) -> ConfigDict:
    """Returns the whole system on one of MODELS."""
    config = common.base(system="nec", data="empathetic_dialogues")
    config.run = ("prepare", "knowledge", "ranker", "generator", "contrastive", "evaluate", "report")
    config.nec = models(model)
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"vocab_size": 10_000, "lowercase": True}})
    if model != "scratch":
        config.prepare.tokenizer = ConfigDict({"pretrained": config.nec.generator.pretrained})
    config.knowledge = ConfigDict(
        {
            "kind": "knowledge",
            "shuffled": False,
            "social": {  # the paper: COMET
                "source": "atomic",
                "path": "",
                "tails": 3,  # ours: for each of five relations; one of each is read
            },
            "entity": {"source": "wordnet", "path": "/usr/share/wordnet", "tails": 3},
        }
    )
    config.generator = generator(model)
    config.contrastive = contrastive(model)
    config.evaluate = ConfigDict(
        {"kind": "evaluate", "stage": "contrastive", "index": "", "buckets": BUCKETS, "judge": ""}
    )
    config.report = ConfigDict({"kind": "report", "paper_row": "NEC", "peers": ""})
    return config


def models(model: str) -> ConfigDict:
    """Returns the settings that all stages share."""
    generators = {
        "t5": {"architecture": "t5", "pretrained": WHEEL, "dropout": 0.1},
        "bart": {"architecture": "bart", "pretrained": "facebook/bart-base", "preset": "bart-base", "dropout": 0.1},
        "scratch": common.SCRATCH,
    }
    return ConfigDict(
        {
            "generator": generators[model],
            "layout": {
                "max_context_tokens": 72,  # ours: the newest turns; NEC uses the last 10
                "max_passage_tokens": 64,  # of facts about things, including their prompt
                "max_target_tokens": 40,
            },
            "decoding": {
                "method": "beam",
                "num_beams": 5,  # the code's
                "max_tokens": 30,  # Sec. 4.2
                # ours: else one reply in 16 says a sentence twice; T5 splits "I'm" into three, see T5_CONSENSUS
                "no_repeat_ngram": 4 if model == "t5" else 3,
                "rerank": "similarity",
                "rerank_similarity": 0.7,  # alpha, Sec. 4.2
                "rerank_likelihood": "normalised",  # the code's; Eq. 14 is "probability"
            },
            "entity": True,
            "social": True,
            "entity_facts": 3,  # Sec. 3.2
            "facts_as": "sentences",  # the code's; Eq. 3 is "triples"
            "social_tokens": 24,
            "ranker": "",  # the argument "ranker" trains one; ours without it: the selector ranks all facts
            "selector": {"pretrained": "minilm", "dropout": 0.0},  # the paper: MPNet, not tuned to compare sentences
        }
    )


def generator(model: str) -> ConfigDict:
    """Returns the warm-up: likelihood alone, until it stops improving (Sec. 4.2)."""
    return common.train(
        task="generator",
        buckets=BUCKETS,
        learning_rate=1e-3 if model == "scratch" else 3e-4,  # the paper: 1e-5 for BART-base
        best_metric="nll",
        patience=2,
        optimizer=common.linear(100, weight_decay=0.01, groups=GROUPS[model]),
    )


def contrastive(model: str) -> ConfigDict:
    """Returns the stage with likelihood and contrast (Eq. 9)."""
    return common.train(
        task="contrastive",
        start_from="generator",
        contrast={
            "weight": 1.0,  # Eq. 9
            "margin": 0.01,  # gamma, Sec. 3.4
            "in_batch": True,
            "different": 3,  # the code's, as the next two
            "frequent": 3,
            "own": 5,
            "own_tokens": 20,  # ours
            "max_candidates": 16,  # CoNT's; NEC keeps up to 64
        },
        buckets=BUCKETS,
        learning_rate=2e-4 if model == "scratch" else 5e-5,
        best_metric="loss",
        optimizer=common.linear(30, weight_decay=0.01, groups=[OUTPUT] if model == "t5" else []),
    )


def add_ranker(config: ConfigDict) -> None:
    """Adds the ranker of facts about things, trained on whether responses use them (Sec. 3.2)."""
    config.nec.ranker = "ranker"
    config.ranker = common.train(
        task="ranker",
        encoder={"pretrained": "minilm", "num_layers": 3},  # the paper: BERT-base
        margin=0.3,  # the code's
        max_tokens=96,
        buckets=(48, 96),
        learning_rate=5e-5,  # the code's
        best_metric="pair_accuracy",
        best_mode="max",
        **common.sizes(steps=300, batch_size=32, evaluations=3),
        optimizer=common.linear(30),
    )


def budget(config: ConfigDict, model: str, machine: str) -> None:
    """Sets the steps, batches and arithmetic for one of MODELS on one of MACHINES.

    On a CPU a model from scratch gets `common.SCRATCH_STEPS`; a pretrained one sees all responses once.
    """
    if machine == "cpu":
        steps = common.SCRATCH_STEPS if model == "scratch" else common.ONE_EPOCH
        config.nec.generator.update(common.ON_CPU)
        config.generator.update(common.sizes(steps=steps, batch_size=32, evaluations=5))
        config.contrastive.update(common.sizes(steps=steps // 8, batch_size=16, evaluations=3))
        config.evaluate.batch_size = 32
    else:
        config.nec.generator.dtype = "bfloat16"
        config.generator.update(common.sizes(steps=5000, batch_size=32, evaluations=5))
        config.contrastive.update(common.sizes(steps=600, batch_size=16, evaluations=3))
        config.evaluate.batch_size = 64
        common.on_gpu(config)


def change(config: ConfigDict, form: str) -> None:
    """Changes `config` to one of FORMS."""
    contrast = config.contrastive.contrast if "contrastive" in config else ConfigDict()
    if form == "no_contrast":
        # As many examples as in both stages together.
        both = config.contrastive
        config.generator.steps += both.steps * both.batch_size // config.generator.batch_size
        config.evaluate.stage = "generator"
        for name in ("rerank", "rerank_similarity", "rerank_likelihood"):
            del config.nec.decoding[name]
        del config.contrastive
    if form in ("no_entity", "no_social"):
        config.nec[form.removeprefix("no_")] = False
    if form in ("no_self", "no_frequent", "no_emotion"):
        contrast[{"no_self": "own", "no_frequent": "frequent", "no_emotion": "different"}[form]] = 0
    # For evaluation alone, so that a run shares all training with the whole system's.
    if form == "no_rerank" and "rerank" in config.nec.decoding:
        config.evaluate.decoding = ConfigDict({**config.nec.decoding, "rerank_similarity": 0.0})
    if form == "random_beam":
        config.evaluate.decoding = ConfigDict({**config.nec.decoding, "rerank": "random"})
    if form == "shuffled":
        config.knowledge.shuffled = True
    if form == "ranker":
        add_ranker(config)


def shrink(config: ConfigDict, model: str) -> ConfigDict:
    """Shrinks the recipe to seconds: random models, handwritten facts."""
    decodings = {name: config[name].decoding for name in ("nec", "evaluate") if "decoding" in config[name]}
    config.nec.generator = models("scratch").generator
    config = common.shrink(config)
    if model == "t5":
        config.nec.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
    config.nec.selector = ConfigDict({**common.SMALL_ENCODER, "dropout": 0.0})
    config.nec.layout = ConfigDict({"max_context_tokens": 24, "max_passage_tokens": 64, "max_target_tokens": 16})
    config.nec.social_tokens = 12
    for name, decoding in decodings.items():
        config[name].decoding = ConfigDict({**decoding, "num_beams": 3, "max_tokens": 12})
    sample = {"source": "sample"}
    if "knowledge" in config:
        config.knowledge.update({"social": sample, "entity": sample})
    for name in ("generator", "contrastive", "evaluate"):
        if name in config:
            config[name].buckets = (96,)
        if name in config and "optimizer" in config[name]:
            config[name].optimizer.warmup_steps = 1
    if "ranker" in config:
        config.ranker.encoder = ConfigDict(common.SMALL_ENCODER)
        config.ranker.max_tokens = 48
    if "contrastive" in config:
        contrast = config.contrastive.contrast
        contrast.own_tokens = 8
        contrast.own = min(contrast.own, 2)
    config.report.paper_row = ""
    return config
