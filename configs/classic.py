r"""The usual baselines: one word-level model, with the parts of each system.

  python -m empax.main --config=configs/classic.py:NAME --config.data.dir=DATA
  python -m empax.main --config=configs/classic.py:NAME,machine=gpu   # 6,500 updates of 32 responses
  python -m empax.main --config=configs/classic.py:NAME,lineage       # trained as the released code trains it
  python -m empax.main --config=configs/classic.py:NAME,consensus     # by the leaderboard's decoder
  python -m empax.main --config=configs/classic.py:NAME,tiny          # a trial on the built-in sample

NAME: transformer (the default), multi_trs, emo_prepend, moel, mime, empdg, empdg_critics, cem, kemp, case. All train on
the same words for the same number of updates; CASE divides them between two stages, and EmoPrepend's classifier has
half as many in addition. CEM reads inferences from the last turn: tails of the nearest event of ATOMIC (in
DATA/knowledge), or those of a COMET (configs/comet_t5.py). KEMP reads concepts of words, here WordNet's
(`--config.knowledge.entity.path=FOLDER`), or those of a file; CASE reads both. "machine=gpu" took three to nine minutes
on a shared H200 (docs/results/classic.md). "lineage" can be combined with either machine.

Loss weights. Released code sums some losses over a batch; ours are means: `nll` over the tokens of responses, all
others over rows, which count by their tokens, or equally if `nll` is 0. A batch of 16 responses has about 240 tokens,
so a released mean over rows beside a sum over tokens has the weight 1/240 here, and a sum over rows 1/15.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from . import common

STEPS = {
    "cpu": common.SCRATCH_STEPS,
    "gpu": 6500,  # ours
}
MACHINES = tuple(STEPS)

# Settings of the released commands and code; the other budgets use ours instead.
LINEAGE: dict[str, dict[str, Any]] = {
    "transformer": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "multi_trs": {"num_encoder_layers": 2, "num_decoder_layers": 2, "weights": {"emotion": 1 / 240}},
    "moel": {"listeners": {"top": 5, "teacher_decay_steps": 10_000}, "weights": {"emotion": 1 / 240}},
    "mime": {"weights": {"emotion": 1 / 240, "kl": 1 / 15}},
    "empdg": {"copies": True},
    "empdg_critics": {"copies": True},
    "case": {"head_dim": 50, "d_ff": 300},
}

FORMS: dict[str, dict[str, Any]] = {
    # MoEL's baselines. Both have 2 layers in its repository; ours have 1 like all others, except with "lineage".
    "transformer": {"readers": ()},
    # ours: its code's 1/240, as MoEL's and MIME's, teaches 15 to 26% of the emotions in our budgets, 1/15 38 to 39%.
    "multi_trs": {"readers": ("emotion",), "weights": {"emotion": 1 / 15}},
    # Rashkin et al. 2019; EmpDG's repository trains it with its own loss.
    "emo_prepend": {"readers": ("emotion",), "weights": {"emotion": 1 / 15}},
    # One listener for each emotion and a shared one, then the decoder's layer.
    "moel": {
        "readers": ("emotion", "listeners"),
        "listeners": {},
        "weights": {"emotion": 1 / 15},
    },
    "mime": {"readers": ("mimicry",), "weights": {"emotion": 1 / 15, "kl": 1 / 15}},
    # The generator alone: in the released code the critics' loss has no gradient (PAPERS.md). Its command sets a
    # dropout of 0.2, which its code does not read.
    "empdg": {
        "readers": ("emotion_words", "emotion"),
        "emotion": {"start": True},
        "weights": {"emotion": 1 / 15},
    },
    # With critics that train it, as a Wasserstein GAN, in the same update: ours, since the released critics do not
    # (`--config.classic.adversary.published=True` follows the released code).
    "empdg_critics": {
        "readers": ("emotion_words", "emotion"),
        "emotion": {"start": True},
        "adversary": {"penalty": 10.0},  # Gulrajani et al. 2017
        "weights": {"emotion": 1 / 15, "adversary": 0.1, "critics": 1.0},
    },
    # Its code has means of all losses, and no label smoothing.
    "cem": {
        "readers": ("refinement", "emotion"),
        "facts_tokens": 24,  # ours: five tails of ATOMIC
        "weights": {"emotion": 1.0, "frequency": 1.5},
    },
    # Its command: one concept per word, ten per context, copying. In its code the attention loss has weight 0.1 beside
    # a sum over tokens; intensities are VADER's instead of NRC_VAD's.
    "kemp": {
        "readers": ("concepts", "emotion"),
        "concepts": {"each": 1, "most": 10},
        "emotion": {"start": True},
        "copies": True,
        "weights": {"emotion": 1 / 15, "attention": 0.1 / 240},
    },
    # Weights of coarse and fine from its command; its code has means of all losses, and no label smoothing.
    "case": {
        "readers": ("alignment",),
        "concepts": {"each": 3, "most": 10},  # its defaults
        "alignment": {"clauses": 4, "facts": 40},  # ours
        "weights": {"emotion": 1.0, "frequency": 1.5, "bag": 1.0, "kl": 1.0, "coarse": 1.0, "fine": 0.2},
    },
}

KNOWLEDGE: dict[str, dict[str, Any]] = {
    "cem": {"social": {"source": "atomic", "path": ""}},
    # ours; KEMP has ConceptNet
    "kemp": {"entity": {"source": "wordnet", "path": "/usr/share/wordnet"}},
    "case": {
        "social": {"source": "atomic", "path": "", "clauses": True},
        "entity": {"source": "wordnet", "path": "/usr/share/wordnet"},
    },
}


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(
        arg, "classic.py", forms=tuple(FORMS), machines=MACHINES, flags=("tiny", "lineage", "consensus")
    )
    name = chosen.form or "transformer"
    config = recipe(name, STEPS[chosen.machine or "cpu"], lineage="lineage" in chosen.flags)
    if chosen.machine == "gpu":
        common.on_gpu(config)
    return common.decode_alike(_shrunk(config, name) if chosen.tiny else config, chosen)


def recipe(name: str, steps: int, *, lineage: bool) -> ConfigDict:
    """Returns one of FORMS, trained for `steps` updates or as released."""
    form = dict(FORMS[name])
    if "listeners" in form:
        form["listeners"] = {"teacher_decay_steps": steps // 3}  # ours: teacher forcing ends within any budget
    if lineage:
        form.update(LINEAGE.get(name, {}))
    config = common.base(system="classic", data="empathetic_dialogues")
    config.run = ("prepare", "generator", "evaluate", "report")
    config.prepare = ConfigDict(
        {
            "kind": "prepare",
            # ours: words that occur twice in training, 12,973. The lineage uses every word of all three splits, 24,194.
            "tokenizer": {"kind": "words", "style": "moel", "min_count": 2, "vocab_size": 20_000},
        }
    )
    weights = form.pop("weights", {})
    config.classic = models(form)
    config.generator = generator(steps, weights)
    config.evaluate = ConfigDict(
        {"kind": "evaluate", "stage": "generator", "buckets": (32, 64, 128), "batch_size": 32, "linear_judge": True}
    )
    config.report = ConfigDict({"kind": "report", "paper_row": "", "peers": ""})
    if lineage:
        _train_as_released(config, name)
    if name == "emo_prepend":
        # A classifier of the same size; its top emotion is prepended to each context.
        learnt = {"weights": {"nll": 0.0, "emotion": 1.0}, "best_metric": "emotion_accuracy", "best_mode": "max"}
        _train_first(config, "emotions", learnt, steps=config.generator.steps // 2, evaluations=6)
        config.generator.prepend = "emotions"
    if name in KNOWLEDGE:
        config.run = ("prepare", "knowledge", "generator", "evaluate", "report")
        config.knowledge = ConfigDict({"kind": "knowledge", **KNOWLEDGE[name]}, convert_dict=True)
    if name == "case":
        # The choice from the graphs, by the bag-of-words loss alone; CASE's code has 4 epochs.
        alone = {**dict.fromkeys(("nll", *weights), 0.0), "bag": 1.0}
        learnt = {"weights": alone, "best_metric": "bag_loss"}
        _train_first(config, "choice", learnt, steps=10_072 if lineage else steps // 3, evaluations=2)
        config.generator.start_from = "choice"
        if not lineage:
            rest = steps - steps // 3
            config.generator.update({"steps": rest, "eval_every_steps": rest // 6, "checkpoint_every_steps": rest // 6})
            config.generator.optimizer.warmup_steps = rest // 8
    if "adversary" in form:
        config.generator.optimizer.groups = [{"pattern": "critic/", "learning_rate_scale": 0.1, "schedule": "constant"}]
    return config


def models(form: Mapping[str, Any]) -> ConfigDict:
    """Returns the settings that all stages share, with those of a form."""
    return ConfigDict(
        {
            "d_model": 300,  # MoEL's code, as are the next five
            "num_heads": 2,
            "head_dim": 20,
            "d_ff": 50,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "vectors": "minilm",  # ours: GloVe 6B, 300-d, is in no package
            "max_context_tokens": 128,  # ours: 99% of contexts have at most 116 words
            "max_target_tokens": 50,  # ours: 99.6% of responses
            "dtype": "bfloat16",  # ours, for speed
            "decoding": {"method": "greedy", "max_tokens": 50},  # MIME's code
            **form,
        },
        convert_dict=True,
    )


def generator(steps: int, weights: Mapping[str, float]) -> ConfigDict:
    """Returns the stage that learns to answer, and the losses of `weights`."""
    return common.train(
        task="generator", steps=steps, batch_size=32, buckets=(32, 64, 128), weights=weights,
        best_metric="nll", eval_every_steps=steps // 6, log_every_steps=50, checkpoint_every_steps=steps // 6,
        # ours, as in REG's generator. With 2e-3 (and in bfloat16) the validation loss of Multi-TRS is 3.747 nats a word
        # after 800 updates, 3.788 with 1e-3, but emotions are right for 28.9% and 34.2%, one seed each (results/trials/
        # multi_trs.json). Its code has the Noam schedule with a warm-up of 8,000, longer than our runs.
        learning_rate=1e-3,
        optimizer=common.linear(steps // 8),
    )  # fmt: skip


def _train_as_released(config: ConfigDict, name: str) -> None:
    """Sets 20,000 updates of 16 responses; most released code stops no earlier, and none of it clips gradients."""
    config.classic.dtype = "float32"
    config.generator.update({"steps": 20_000, "batch_size": 16, "eval_every_steps": 2000,
                             "checkpoint_every_steps": 500, "eval_batch_size": 32})  # fmt: skip
    if name not in ("cem", "case"):
        config.generator.label_smoothing = 0.1  # ours: 0, see PAPERS.md
    # The peak of the Noam schedule, 300^-0.5 min(n^-0.5, n 8000^-1.5), at n = 8,000.
    config.generator.optimizer.update(
        {"learning_rate": 6.455e-4, "warmup_steps": 8000, "schedule": "rsqrt", "clip_norm": None, "b2": 0.98,
         "eps": 1e-9}
    )  # fmt: skip
    if name == "case":
        config.generator.optimizer.update({"learning_rate": 5.270e-4, "warmup_steps": 12_000})


def _train_first(config: ConfigDict, name: str, changes: Mapping[str, Any], *, steps: int, evaluations: int) -> None:
    """Adds a stage before the generator's that trains the same model for `steps`, with `changes` of its settings."""
    place = config.run.index("generator")
    config.run = (*config.run[:place], name, *config.run[place:])
    stage = ConfigDict(config.generator.to_dict(), convert_dict=True)
    stage.update({**changes, "steps": steps, "eval_every_steps": steps // evaluations})
    if stage.optimizer.schedule == "linear":  # else as released
        stage.optimizer.warmup_steps = steps // 8
    config[name] = stage


def _shrunk(config: ConfigDict, name: str) -> ConfigDict:
    """Shrinks the recipe to seconds on the built-in sample."""
    config.data.name = "sample"
    config.classic.update({"d_model": 32, "head_dim": 8, "d_ff": 16, "vectors": "", "max_context_tokens": 48,
                           "max_target_tokens": 20})  # fmt: skip
    config.classic.decoding.max_tokens = 8
    config.prepare.tokenizer.min_count = 1
    if "knowledge" in config:
        for about in KNOWLEDGE[name]:
            config.knowledge[about] = {"source": "sample"}
    if name == "case":
        config.classic.alignment.update({"clauses": 2, "facts": 6, "tokens": 8})
    for stage in ("emotions", "choice", "generator"):
        if stage in config:
            config[stage].update({**common.FEW_STEPS, "batch_size": 8, "buckets": (48,)})
            config[stage].optimizer.warmup_steps = 1
    config.evaluate.update({"buckets": (48,), "batch_size": 16, "linear_judge": False})
    return config
