r"""LEMPEx on EmpatheticDialogues (Majumder et al.): exemplars and four empathetic losses, sized for two CPU cores.

  python -m empax.main --config=configs/lempex.py --config.data.dir=DATA
  python -m empax.main --config=configs/lempex.py:no_losses             # "w/o Emp. Losses"
  python -m empax.main --config=configs/lempex.py:no_exemplars
  python -m empax.main --config=configs/lempex.py:t5_glove              # T5-GloVe: without both
  python -m empax.main --config=configs/lempex.py:t5                    # pretrained weights; its T5-PT: t5,t5_glove
  python -m empax.main --config=configs/lempex.py:pretrained_retriever  # the retriever as pretrained (Table 3)
  python -m empax.main --config=configs/lempex.py:predicted_emotion     # exemplars of the context's predicted emotion
  python -m empax.main --config=configs/lempex.py:gold_emotion          # of its gold emotion, as in its code: a leak
  python -m empax.main --config=configs/lempex.py:eq10                  # the losses as in Eq. 10
  python -m empax.main --config=configs/lempex.py:unfrozen              # judges that are trained too, as in its code
  python -m empax.main --config=configs/lempex.py:time_axis             # its code's softmax over time
  python -m empax.main --config=configs/lempex.py:gumbel                # straight-through samples, not expectations
  python -m empax.main --config=configs/lempex.py:binary                # mid and high as one level, as in its code
  python -m empax.main --config=configs/lempex.py:weights_1             # loss weights of 1: vapid by Sec. 3.5
  python -m empax.main --config=configs/lempex.py:q=10                  # ten exemplars
  python -m empax.main --config=configs/lempex.py:no_judges             # exemplars alone; EPITOME is not needed
  python -m empax.main --config=configs/lempex.py:machine=gpu           # 5,000 updates instead of 4,000
  python -m empax.main --config=configs/lempex.py:full_size             # the paper's layers and learning rate
  python -m empax.main --config=configs/lempex.py:consensus             # by the leaderboard's decoder
  python -m empax.main --config=configs/lempex.py:tiny                  # a trial on the built-in sample

Forms can be combined: ":no_losses,q=10,tiny". With --reuse=WORKDIR a form reuses shared stages of a finished run.
"machine=gpu" took nine minutes on a shared H200, with an older optimiser (docs/results/lempex.md). The budget of two
CPU cores has not been run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from . import common, lempex_retriever

FORMS = ("no_losses", "no_exemplars", "t5_glove", "no_judges", "t5", "pretrained_retriever", "predicted_emotion",
         "gold_emotion", "eq10", "unfrozen", "time_axis", "gumbel", "binary", "weights_1", "full_size")  # fmt: skip
MACHINES = ("cpu", "gpu")
WHEEL = "flan-t5-small-titles"
CHANGES = {
    "unfrozen": {"frozen_judges": False},
    "time_axis": {"softmax_axis": "time"},
    "gumbel": {"soft": "straight_through"},
    "binary": {"binary": True},
    "weights_1": {"weights": dict.fromkeys(("emotional_reaction", "interpretation", "exploration", "sentiment"), 1.0)},
}
"""Forms that change only settings of the generator's stage."""

READER = {"pretrained": "minilm", "num_layers": 3, **common.ON_CPU}
"""The encoder of judges."""

POSITIONS = {"pattern": "relative_bias$", "learning_rate_scale": 0.15}
"""A parameter group for the relative positions; ours.

Adafactor's steps are relative to the root mean square of a parameter. That of the initial slopes is 6 in an encoder and
7 in the decoder, mostly by the farthest distances. With this factor an update moves an entry by about .01, as with
`common.POSITIONS`; without it, by .06 to .07.
"""

SPEAKERS = {"pattern": "^speakers$", "learning_rate_scale": 50.0}
"""A parameter group for the speaker embeddings beside a pretrained T5; ours.

They start at zero, and alone tell one turn from the next. The word embeddings of FLAN-T5-small have a root mean square
of 13.5, and Adam moves an entry by at most the learning rate in an update: at the plain rate it would reach .31.
"""


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "lempex.py", flags=(*FORMS, "consensus", "tiny"), machines=MACHINES, numbers=("q",))
    config = recipe()
    if chosen.machine == "gpu":
        more_steps(config)
        common.on_gpu(config)
    elif "t5" in chosen.flags:
        config.generator.update(common.sizes(steps=common.ONE_EPOCH, batch_size=32, evaluations=5))
    forms = [form for form in FORMS if form in chosen.flags] + [f"q={count}" for count in chosen.numbers.values()]
    common.check_together(arg, "lempex.py", tuple(forms), read)
    for form in forms:
        change(config, form)
    config.run = tuple(name for name in config.run if name in config)
    return common.decode_alike(shrink(config) if chosen.tiny else config, chosen, common.T5_CONSENSUS)


def read(forms: Sequence[str]) -> ConfigDict:
    """Returns the recipe with `forms`, without settings that are then unused."""
    config = recipe()
    for form in forms:
        change(config, form)
    generator = config.generator
    if not generator.index:
        del config.lempex.passages
    if generator.losses == "judges":
        return config
    unread = {"frozen_judges", "soft", "softmax_axis", "temperature"}
    if generator.losses == "none":
        unread |= {"binary", "weights"}
    for name in unread & set(generator.keys()):
        del generator[name]
    return config


def recipe() -> ConfigDict:
    config = common.base(system="lempex", data="empathetic_dialogues")
    # In this order, a form without the regressor or the exemplars shares all earlier stages (--reuse).
    config.run = ("prepare", "judges", "second_seed", "assess", "annotate", "retriever", "index", "sentiment",
                  "generator", "evaluate", "swaps", "report")  # fmt: skip
    config.lempex = models()
    # One vocabulary for generator and judges, MiniLM's, so that judges can read distributions over it.
    config.prepare = ConfigDict({"kind": "prepare", "tokenizer": {"pretrained": "minilm", "tags": False}})
    config.judges = judges(seed=0)
    config.second_seed = judges(seed=1)  # on other posts; not used in training
    config.assess = ConfigDict({"kind": "assess", "judges": ("judges", "second_seed")})
    config.sentiment = sentiment()
    config.annotate = ConfigDict({"kind": "annotate", "classifiers": ("judges",), "contexts": False})
    config.retriever = lempex_retriever.retriever()
    config.index = lempex_retriever.index(encoder="retriever", queries={"train": 0, "validation": 1000})
    config.generator = generator()
    judged = {"judge": "annotate", "second_judge": "second_seed", "linear_judge": True}
    config.evaluate = ConfigDict(
        {"kind": "evaluate", "stage": "generator", "index": "index", "buckets": (40, 72), "batch_size": 32, **judged}
    )
    config.swaps = common.swaps()
    config.report = ConfigDict({"kind": "report", "paper_row": "LEMPEx", "peers": ""})
    return config


def models() -> ConfigDict:
    """Returns the settings that all stages share."""
    return ConfigDict(
        {
            # The paper's T5-GloVe has 6 + 6 layers (full_size) and GloVe's word vectors; ours are MiniLM's, reduced
            # by PCA.
            "generator": {
                "architecture": "t5_from_scratch",
                "d_model": 300,  # Sec. 4.2, as are the next three
                "num_heads": 6,
                "head_dim": 50,
                "d_ff": 2048,
                "num_encoder_layers": 3,
                "num_decoder_layers": 4,
                "dropout": 0.1,
                "embeddings": "minilm",
                **common.ON_CPU,
            },
            **lempex_retriever.towers(),
            "layout": {  # ours: nearly all texts fit (its code: 200 and 50, 10 exemplars of any length)
                "max_context_tokens": 72,
                "max_passage_tokens": 32,
                "max_target_tokens": 32,
                **lempex_retriever.LAYOUT,
            },
            # Its code samples (k = 20, T = .9, 20 tokens); its Alg. 5 has beam search.
            "decoding": {"method": "sample", "top_k": 20, "temperature": 0.9, "max_tokens": 20},
            "passages": 5,  # q: Fig. 1 shows five; the paper does not state the number
        }
    )


def judges(**more: Any) -> ConfigDict:
    """Returns classifiers of the three mechanisms over one encoder (the paper: three encoders, T5-base)."""
    return common.train(
        task="attributes.classifier",
        encoder=READER,
        max_tokens=128,
        buckets=(64, 128),
        hide_response_probability=0.0,
        learning_rate=2e-4,
        best_metric="weighted_f1",
        best_mode="max",
        optimizer=common.linear(40, groups=[common.FIXED_EMBEDDING]),
        **common.sizes(steps=300, batch_size=32, evaluations=4),
        **more,
    )


def sentiment() -> ConfigDict:
    """Returns the regressor of VADER's scores (Alg. 1)."""
    return common.train(
        task="attributes.sentiment",
        encoder=READER,
        max_tokens=40,
        buckets=(24, 40),
        max_examples=12_800,
        learning_rate=2e-4,
        best_metric="mae",
        optimizer=common.linear(40, groups=[common.FIXED_EMBEDDING]),
        seed=0,
        **common.sizes(steps=400, batch_size=32, evaluations=2),
    )


def generator() -> ConfigDict:
    """Returns the generator with its five losses (Sec. 3.5, Alg. 4)."""
    return common.train(
        task="generator",
        index="index",
        losses="judges",
        judges=("judges",),
        sentiment="sentiment",
        weights={  # Sec. 3.5
            "generation": 1.0,
            "emotional_reaction": 0.1,
            "interpretation": 0.1,
            "exploration": 0.1,
            "sentiment": 0.1,
        },
        buckets=(40, 72),
        # ours; its code: 1e-4, for fifty epochs. T5's embeddings start with a deviation of 1, which Adam's equal
        # steps hardly change; Adafactor's steps are relative to the parameters (Raffel et al. 2020 trained T5 with it).
        learning_rate=1e-2,
        best_metric="nll",
        max_validation_examples=1000,
        optimizer=common.linear(300, method="adafactor", groups=[POSITIONS]),
        **common.sizes(steps=common.SCRATCH_STEPS, batch_size=32, evaluations=5),
    )


def more_steps(config: ConfigDict) -> None:
    """Sets the budget of a GPU: the same models, trained for longer (its code: fifty epochs)."""
    for judge in (config.judges, config.second_seed):
        judge.update({"steps": 600, "eval_every_steps": 150})
    lempex_retriever.more_steps(config.retriever)
    config.sentiment.update({"steps": 800, "max_examples": 25_600, "eval_every_steps": 200})
    config.generator.update({"steps": 5000, "eval_every_steps": 1000, "checkpoint_every_steps": 1000})
    config.generator.optimizer.warmup_steps = 500


def drop(config: ConfigDict, *stages: str) -> None:
    for name in stages:
        if name in config:
            del config[name]


def change(config: ConfigDict, form: str) -> None:
    """Changes `config` to one of FORMS, or to "q=NUMBER" exemplars."""
    generator = config.generator
    if form.startswith("q="):
        config.lempex.passages = int(form.removeprefix("q="))
        if "index" in config:
            config.index.candidates = max(config.index.candidates, config.lempex.passages)
    if form in ("no_losses", "t5_glove", "no_judges", "eq10"):
        losses = "first_state" if form == "eq10" else "none"
        generator.update({"losses": losses, "judges": (), "sentiment": ""})
        drop(config, "sentiment")
    if form in ("no_exemplars", "t5_glove"):
        generator.index = config.evaluate.index = ""
        drop(config, "retriever", "index", "swaps")
    if form == "no_judges":
        drop(config, "judges", "second_seed", "assess", "annotate")
        config.evaluate.update({"judge": "", "second_judge": "", "linear_judge": False})
    if form == "pretrained_retriever" and "index" in config:
        drop(config, "retriever")
        config.index.encoder = ""
    if form in ("predicted_emotion", "gold_emotion") and "index" in config:
        config.index.filter = form
    if form == "t5":
        t5 = {"pretrained": WHEEL, "dropout": 0.1, **common.ON_CPU}
        config.lempex.generator = ConfigDict({"architecture": "t5", **t5})
        config.prepare.tokenizer = ConfigDict({"pretrained": WHEEL, "tags": False})
        for name in ("judges", "second_seed", "sentiment"):
            if name in config:
                config[name].encoder = ConfigDict(t5)
        generator.optimizer.update({"method": "adamw", "learning_rate": 5e-4, "warmup_steps": 100})
        generator.optimizer.weight_decay = 0.01
        generator.optimizer.groups = [SPEAKERS]
    generator.update(CHANGES.get(form, {}))
    if form == "full_size":
        config.lempex.generator.update({"num_encoder_layers": 6, "num_decoder_layers": 6})
        config.lempex.layout.update({"max_context_tokens": 200, "max_passage_tokens": 50, "max_target_tokens": 50})
        # Fifty epochs, patience 5 (Sec. 3.5); the learning rate is that of its code, the paper has 1e-5.
        generator.update({"steps": 63_000, "buckets": (32, 64, 128, 200), "eval_every_steps": 1260, "patience": 5})
        generator.optimizer = ConfigDict({"learning_rate": 1e-4, "clip_norm": 1.0})
        config.evaluate.buckets = (32, 64, 128, 200)


def shrink(config: ConfigDict) -> ConfigDict:
    """Shrinks the recipe to seconds: with a separate vocabulary, and judges from scratch on it."""
    architecture = config.lempex.generator.architecture
    config.lempex.generator = ConfigDict({"architecture": "t5_from_scratch"})
    config = common.shrink(config)
    if architecture == "t5":
        config.lempex.generator = ConfigDict({"architecture": "t5", "preset": "t5-tiny"})
    for name in ("judges", "second_seed", "sentiment"):
        if name in config:
            config[name].encoder = ConfigDict(common.SMALL_ENCODER)
            config[name].max_tokens = 64
            if name != "sentiment":
                config[name].data = "sample"
    config.evaluate.linear_judge = False
    return config
