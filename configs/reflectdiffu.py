r"""ReflectDiffu on EmpatheticDialogues: reasons, contagion, intent twice, mimicry by diffusion, copying.

  python -m empax.main --config=configs/reflectdiffu.py --config.data.dir=DATA
  python -m empax.main --config=configs/reflectdiffu.py:machine=gpu        # as many updates as configs/classic.py
  python -m empax.main --config=configs/reflectdiffu.py:no_mimicry,eq5     # forms can be combined
  python -m empax.main --config=configs/reflectdiffu.py:consensus          # by the leaderboard's decoder
  python -m empax.main --config=configs/reflectdiffu.py:tiny               # a trial on the built-in sample

Forms (docs/reflectdiffu.md): the paper's ablations no_reasons (w/o ERA), no_experts (w/o C-Experts), no_second_intent
(w/o Intent twice), no_mimicry (w/o EMU), and plain, all of them without a pointer; as printed batch_majority (Eq. 4),
eq5, eq7, eq9, eq10, table_1; the controls no_tags, shuffled_tags, untrained_reasons, constant_second, no_prior; and,
ours, empathy_reward. With --reuse=WORKDIR a form reuses shared stages of a finished run.
DATA has RECCON's spans and intent labels beside the corpus (docs/data.md). Before several fixes, the first command took
1.5 hours on two CPU cores for 2,400 updates (three seeds: perplexity 48.1 per token, BLEU-2 4.7, emotion 44.0%, intent
43.2%), and "machine=gpu" nine minutes on a shared H200 (40.8, 5.9, 41.9%, 41.5%; docs/results/reflectdiffu.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from . import common, empathy_identifiers

ABLATIONS: dict[str, dict[str, Any]] = {
    "no_reasons": {"reasons": ""},
    "no_experts": {"experts": "none"},
    "no_second_intent": {"second_intent": False},
    "no_mimicry": {"mimicry": False},
}
FORMS: dict[str, dict[str, Any]] = {
    **ABLATIONS,
    "plain": {
        **{name: value for changes in ABLATIONS.values() for name, value in changes.items()},
        "copying": False,
        "intent_start": False,
    },
    "batch_majority": {"experts": "batch_majority"},
    "eq5": {"first_intent": "printed"},
    "eq7": {"restore": "printed"},
    "eq9": {"reward": "alignment", "entropy_weight": 0.0},
    "eq10": {
        "noise_error": False,
        "policy_weight": 0.0,
        "first_weight": 0.0,
        "recognition": "noisy",
        "kl_weight": 1.0,
    },
    "table_1": {"actions": "table_1"},
    "no_tags": {"reason_tags": "none"},
    "shuffled_tags": {"reason_tags": "shuffled"},
    "untrained_reasons": {"reason_tags": "none"},
    "constant_second": {"constant_second": True},
    "no_prior": {"final_prior": False},
    "empathy_reward": {"reward": "empathy", "judges": ("identifiers",)},
}
"""Changes of each form in the joint stage."""

POLICY = ("actions", "policy_weight", "entropy_weight", "reward", "judges")
UNREAD: dict[tuple[str, Any], tuple[str, ...]] = {
    ("reasons", ""): ("reason_tags",),
    ("second_intent", False): (*POLICY, "constant_second", "final_prior", "first_weight"),
    ("constant_second", True): POLICY,
    ("policy_weight", 0.0): ("entropy_weight", "reward", "judges"),
    ("mimicry", False): ("restore", "noise_error", "recognition", "kl_weight"),
}
"""Settings that are unused if a setting of the joint stage has a value."""

MACHINES = ("cpu", "gpu")
CPU = {"num_layers": 3, "unroll": 3}  # for encoders: half of MiniLM's time
ENCODER = {"steps": 300, "batch_size": 32, "evaluations": 3}
"""Sizes of a stage that trains an encoder. After 200 to 300 updates of the annotator, its loss on validation rises."""

SMALL = {**common.SMALL_ENCODER, "num_layers": 1, "max_positions": 64}
FEW = {**common.FEW_STEPS, "batch_size": 8, "buckets": (40,)}
"""Settings of encoders and stages in a trial."""


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "reflectdiffu.py", flags=(*FORMS, "consensus", "tiny"), machines=MACHINES)
    config = recipe()
    budget(config, chosen.machine or "cpu")
    forms = [form for form in FORMS if form in chosen.flags]
    common.check_together(arg, "reflectdiffu.py", tuple(forms), read)
    changes = {name: value for form in forms for name, value in FORMS[form].items()}
    idle = unread({**config.generator, **changes})
    config.generator.update({name: value for name, value in changes.items() if name not in idle})
    if "untrained_reasons" in forms:
        config.reasons.optimizer.learning_rate = 0.0
    if not config.generator.reasons:
        config.run = tuple(name for name in config.run if name != "reasons")
        del config["reasons"]
    config = shrink(config) if chosen.tiny else config
    if "empathy_reward" in chosen.flags:
        config.identifiers = (empathy_identifiers.tiny if chosen.tiny else empathy_identifiers.identifiers)(seed=0)
        config.run = ("prepare", "identifiers", *config.run[1:])
        config.evaluate.judge = "identifiers"
    return common.decode_alike(config, chosen)


def read(forms: Sequence[str]) -> dict[str, Any]:
    """Returns the settings that a run of `forms` reads, of those that forms change."""
    settings = {"reason_tags": "marked", "constant_second": False, **generator().to_dict()}
    for form in forms:
        settings |= FORMS[form]
    trained = bool(settings["reasons"]) and "untrained_reasons" not in forms
    idle = unread(settings)
    found = {name: value for name, value in settings.items() if name not in idle}
    return {"generator": found, "reasons": {"trained": trained}}


def unread(settings: Mapping[str, Any]) -> set[str]:
    """Returns the names of the joint stage's settings that are unused beside the others."""
    return {name for (setting, value), names in UNREAD.items() if settings.get(setting) == value for name in names}


def recipe() -> ConfigDict:
    """Returns the whole system without its budget."""
    config = common.base(system="reflectdiffu", data="empathetic_dialogues")
    # In this order, a form without reasons shares all stages before the joint one (--reuse).
    config.run = ("prepare", "intents", "reasons", "generator", "evaluate", "report")
    config.reflectdiffu = models()
    config.prepare = ConfigDict(
        {
            "kind": "prepare",
            # ours: words that occur twice in training, 12,973, as in configs/classic.py
            "tokenizer": {"kind": "words", "style": "moel", "min_count": 2, "vocab_size": 20_000},
        }
    )
    config.reasons = reasons()
    config.intents = intents()
    config.generator = generator()
    config.evaluate = ConfigDict({"kind": "evaluate", "stage": "generator", "index": "", "buckets": (32, 64, 100)})
    config.report = ConfigDict({"kind": "report", "paper_row": "ReflectDiffu", "peers": ""})
    return config


def models() -> ConfigDict:
    """Returns the settings that all stages share."""
    return ConfigDict(
        {
            "model": {  # MoEL's lineage, which Sec. 4.3 follows
                "d_model": 300,
                "num_heads": 2,
                "head_dim": 20,
                "d_ff": 50,
                "kernel": 3,
                "num_encoder_layers": 1,
                "num_decoder_layers": 1,
                "dropout": 0.0,
                "vectors": "minilm",  # the paper: 300-d GloVe, which is in no package
            },
            "max_context_tokens": 100,  # ours: 99% of contexts have at most 116 words
            "max_piece_tokens": 100,
            "max_target_tokens": 50,  # the lineage
            "decoding": {"method": "greedy", "max_tokens": 50},  # the lineage
        }
    )


def reasons() -> ConfigDict:
    """Returns the stage of ERA (Eq. 13 to 16)."""
    return _encoder(
        task="reasons",
        data="reccon",  # the paper: spans by GLM-4, which were not released
        own="^(query|key|emission|emission_bias|transitions)$",
    )


def _encoder(*, task: str, own: str, **more: Any) -> ConfigDict:
    """Returns a stage that trains MiniLM and the randomly initialised parameters of the task, by the pattern `own`.

    It is selected by its likelihood: the generator reads probabilities and states, not the likeliest labels alone.
    """
    return common.train(
        task=task,
        encoder={"pretrained": "minilm"},  # the paper: BERT
        buckets=(32, 64, 100),
        learning_rate=1e-4,  # ours
        best_metric="loss",
        best_mode="min",
        optimizer=common.linear(40, groups=[common.FIXED_EMBEDDING, {"pattern": own, "learning_rate_scale": 5.0}]),
        **more,
    )


def annotator(*, tiny: bool) -> ConfigDict:
    """Returns the stage for recipes of other systems, sized for two cores, or for seconds."""
    stage = reasons()
    stage.task = "attributes.reasons"
    stage.encoder.update(CPU)
    stage.update(common.sizes(**ENCODER))
    if tiny:
        stage.update({"data": "sample", **FEW})
        stage.encoder = ConfigDict(SMALL)
        stage.optimizer.warmup_steps = 2
    return stage


def intents() -> ConfigDict:
    """Returns the stage of p_intent in Eq. 5, from the context alone."""
    return _encoder(task="intents", own="^head/")


def generator() -> ConfigDict:
    """Returns the joint stage (Eq. 12)."""
    return common.train(
        task="generator",
        reasons="reasons",
        intents="intents",
        experts="row",  # Eq. 4, by row
        contrastive_weight=1.0,  # Eq. 20
        temperature=0.07,  # ours; Khosla et al. 2020
        classifier_share=0.5,  # alpha of Eq. 5: ours
        first_weight=1.0,  # ours
        final_prior=True,  # ours
        second_intent=True,
        actions="train_statistics",
        num_actions=3,  # Sec. 3.3.1
        policy_weight=0.1,  # ours
        entropy_weight=0.1,  # ours: "exploration-exploitation trade-off" (Sec. 3.3.1)
        reward="label",  # ours; Eq. 9: "alignment"
        mimicry=True,
        diffusion={"steps": 1000, "first": 1e-5, "last": 5e-2},  # Sec. 3.3.1 and 4.3
        state_time=200,  # ours
        restore="estimate",
        noise_error=True,
        recognition="clean",  # ours: the paper does not describe prior and posterior
        kl_weight=2 / 300,  # the likelihood's bound, of 300 dimensions; Eq. 10: 1
        copying=True,  # Eq. 11
        slots=20,  # ours
        intent_start=True,  # ours
        emotion_weight=1.0,  # delta: ours
        twice_weight=1.0,  # zeta: ours
        response_weight=1.0,  # eta: ours
        buckets=(32, 64, 100),
        best_metric="nll",
        learning_rate=1e-3,
    )


def budget(config: ConfigDict, machine: str) -> None:
    """Sets the steps, batches and arithmetic for a machine, one of MACHINES."""
    rate = config.generator.optimizer
    if machine == "cpu":
        sizes = {
            "reasons": common.sizes(**ENCODER),
            "intents": common.sizes(**ENCODER),
            "generator": common.sizes(steps=common.SCRATCH_STEPS, batch_size=32, evaluations=4),
        }
        rate.update(common.linear(common.SCRATCH_STEPS // 8))  # an eighth, as in configs/classic.py
        for stage in (config.reasons, config.intents):
            stage.encoder.update(CPU)
        config.evaluate.batch_size = 32
    else:
        sizes = {
            "reasons": common.sizes(**ENCODER),
            # Less than one epoch of 32,992 labelled contexts: the generator reads its probabilities of the same ones.
            "intents": common.sizes(steps=1000, batch_size=32, evaluations=5),
            "generator": common.sizes(steps=6500, batch_size=32, evaluations=5),  # Sec. 4.3: 16,000
        }
        # Its Noam schedule with a "decay factor of 0.01" would peak at 7.5e-6.
        rate.update(common.linear(812))  # as in configs/classic.py
        config.evaluate.batch_size = 64
    for name, size in sizes.items():
        config[name].update(size)
    if machine == "gpu":
        common.on_gpu(config)


def shrink(config: ConfigDict) -> ConfigDict:
    """Shrinks the recipe to seconds: the built-in sample, random small models, a few steps."""
    config.data.name = "sample"
    config.prepare.tokenizer.min_count = 1
    config.reflectdiffu.model.update({"d_model": 32, "head_dim": 8, "d_ff": 16, "vectors": ""})
    config.reflectdiffu.update({"max_context_tokens": 40, "max_piece_tokens": 40, "max_target_tokens": 16})
    config.reflectdiffu.decoding = ConfigDict({"method": "greedy", "max_tokens": 12})
    config.generator.update({"latent": 4, "hidden": 16})
    for name in config.run:
        section = config[name]
        if section.kind == "train":
            section.update(FEW)
            section.optimizer.warmup_steps = 2
        if "encoder" in section:
            section.encoder = ConfigDict(SMALL)
    if "reasons" in config:
        config.reasons.data = "sample"
    config.evaluate.update({"buckets": (40,), "batch_size": 16})
    return config
