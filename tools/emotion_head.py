r"""Makes weights/emotions-minilm: a linear head for the 32 emotions, from the vectors of a finished run.

  python -m tools.emotion_head RUN weights/emotions-minilm

RUN is the work directory of configs/reg_transformer.py on EmpatheticDialogues, whose stage `index` embeds with the
pretrained MiniLM. The head has a closed-form solution without randomness.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

from empax.core.command import in_one_line
from empax.core.files import WorkDir, replacing, write_json
from empax.core.system import RunContext, load_encoder_of
from empax.core.types import EMOTIONS
from empax.data.store import load_instances
from empax.pipeline.plan import read_plan
from empax.retrieval.filters import fit_emotions
from empax.serving.emotions import FILE, EmotionHead


@in_one_line
def main(workdir: Path, folder: Path) -> None:
    """Writes the head, and prints its accuracy."""
    files = WorkDir(workdir)
    run = RunContext(files, read_plan(files), "index")
    encoder = load_encoder_of(run, "")
    vectors, labels = {}, {}
    for split in ("train", "test"):
        instances = load_instances(run, split)
        vectors[split] = encoder.embed_queries(instances, progress=split)
        labels[split] = np.array([EMOTIONS.index(instance.emotion) for instance in instances])
    found = fit_emotions(vectors["train"], labels["train"]).astype(np.float16)
    weight, bias = found[:-1], found[-1]
    head = EmotionHead(EMOTIONS, weight.astype(np.float32), bias.astype(np.float32), 0.0)
    right = np.array(head(vectors["test"])) == np.array(EMOTIONS)[labels["test"]]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"weight": weight, "bias": bias}
    with replacing(folder / FILE) as path:
        safetensors.numpy.save_file(tensors, path)
    about = {"encoder": "minilm", "emotions": EMOTIONS, "accuracy": round(float(right.mean()), 4), "rows": len(right)}
    write_json(folder / "config.json", about)
    print(f"{100 * right.mean():.2f}% of {len(right):,} test rows are right")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
