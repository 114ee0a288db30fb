r"""LEMPEx's retriever alone: MiniLM in two towers, trained as DPR on EmpatheticDialogues, sized for two CPU cores.

  python -m empax.main --config=configs/lempex_retriever.py --config.data.dir=DATA
  python -m empax.main --config=configs/lempex_retriever.py:machine=gpu  # two epochs instead of a third of one
  python -m empax.main --config=configs/lempex_retriever.py:tiny      # a trial on the built-in sample

Both index stages measure retrieval on validation and test: pretrained (`zero_shot`) and trained (`index`). The
numbers are in STAGE/index.json under "quality". Arms:
  one tower                 --config.lempex.towers=shared
  negatives of the text     --config.retriever.negatives="('other_emotion',)"     # Sec. 3.5.1; Alg. 2 takes both
  in-batch negatives alone  --config.retriever.negatives="()"
  with the Reddit pairs     --config.retriever.dpr_data=ed_reddit
  filters                   --config.index.filter=predicted_emotion, or gold_emotion: the paper's code, a leak
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from . import common

MACHINES = ("cpu", "gpu")
LAYOUT = {"max_query_tokens": 64, "max_key_tokens": 24}  # ours: the newest turns, most responses untruncated


def towers() -> dict[str, Any]:
    """Returns the encoders of the section that all stages share."""
    return {
        "retriever": {"pretrained": "minilm", "normalize": True, "dropout": 0.1, **common.ON_CPU},
        "towers": "separate",
        "key_pretrained": "",
    }


def index(*, encoder: str, queries: dict[str, int]) -> ConfigDict:
    """Returns an index of responses, measured on validation and test."""
    made = common.index(encoder=encoder, candidates=10, queries=queries, method="exact")  # q of its code
    made.update({"filter": "none", "one_per_dialogue": False, "searched": 2047})  # as its code
    made.quality = ConfigDict({"validation": 0, "test": 0})
    return made


def retriever(**more: Any) -> ConfigDict:
    """Returns the stage, for this recipe and for recipes that read its exemplars; `more` are changed settings."""
    settings = {
        "task": "retriever",
        "steps": 400,  # a third of an epoch, some 25 minutes on two cores; the authors: 8 epochs
        "batch_size": 32,  # theirs: 16
        "learning_rate": 5e-5,  # ours; theirs is 2e-5, for an encoder twice as wide and deep
        "temperature": 0.05,  # ours: the dot products of unit vectors have a small range; 1 without `normalize`
        "negatives": ("other_emotion", "same_emotion"),  # Alg. 2
        "dpr_data": "ed",
        "buckets": (32, 64),
        "eval_every_steps": 200,
        "log_every_steps": 20,
        "checkpoint_every_steps": 100,
        "max_eval_examples": 2000,
        "best_metric": "loss",
        "optimizer": common.linear(40, groups=[common.FIXED_EMBEDDING]),
    }
    return common.train(**{**settings, **more})


def more_steps(stage: ConfigDict) -> None:
    """Sets the budget of a GPU: the same encoders, trained for longer."""
    stage.update({"steps": 2500, "eval_every_steps": 500, "checkpoint_every_steps": 500})
    stage.optimizer.warmup_steps = 100


def get_config(arg: str = "") -> ConfigDict:
    chosen = common.arguments(arg, "lempex_retriever.py", machines=MACHINES)
    config = common.base(system="lempex", data="empathetic_dialogues")
    config.run = ("prepare", "zero_shot", "retriever", "index")
    config.lempex = ConfigDict({**towers(), "layout": LAYOUT}, convert_dict=True)
    config.prepare = ConfigDict({"kind": "prepare"})
    config.zero_shot = index(encoder="", queries={})
    config.retriever = retriever()
    config.index = index(encoder="retriever", queries={"train": 0, "validation": 0, "test": 0})
    if chosen.machine == "gpu":
        more_steps(config.retriever)
        common.on_gpu(config)
    return shrink(config) if chosen.tiny else config


def shrink(config: ConfigDict) -> ConfigDict:
    """Shrinks the recipe to seconds."""
    config.data.name = "sample"
    config.lempex.retriever = ConfigDict({**common.SMALL_ENCODER, "normalize": True, "dropout": 0.1})
    config.lempex.layout.update({"max_query_tokens": 16, "max_key_tokens": 16})
    config.prepare.tokenizer = ConfigDict({"vocab_size": 600})
    config.retriever.update({**common.FEW_STEPS, "batch_size": 8, "buckets": (16,)})
    config.retriever.optimizer.warmup_steps = 1
    return config
