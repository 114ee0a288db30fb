r"""Writes the adapters of a run of `configs/published.py` as a folder of weights/, with its card.

  python -m tools.publish --workdir=WORKDIR --output=weights/NAME

The adapters are in PEFT's format, in bfloat16. Without a finished report the card has no numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from empax.core.command import in_one_line
from empax.core.config import ConfigError
from empax.core.files import read_json
from empax.core.paths import expand
from empax.interop.export import Generation
from empax.interop.huggingface import load_config, resolve
from empax.interop.peft import export_adapters
from empax.models.decoder_only import DecoderOnly
from empax.models.transformer import EncoderDecoder
from empax.reporting.tables import describe, format_value, markdown_table, metric_title
from empax.serving.export import ExportSettings, trained_model

_METRICS = ("perplexity_per_word", "bleu_2", "bleu_2_precision", "length_ratio", "distinct_2")
_REPORT = "report.json"

_CARD = """---
license: cc-by-nc-4.0
language: en
base_model: {base}
library_name: peft
datasets: empathetic_dialogues
---

# {name}

LoRA adapters (rank {rank}, all linear layers, bfloat16) on `{base}`, trained to answer people who
tell what happened to them. They come with empax:

```python
import empax

model = empax.load("{name}")
print(model.reply("I lost my keys."))
print(model.reply(["I lost my keys.", "Oh no! Where did you see them last?", "At the beach."]))
```

- **Data**: the training split of EmpatheticDialogues (Rashkin et al. 2019): {rows}.
  The corpus is CC BY-NC 4.0, and so are these weights ([LICENSE](../LICENSE)): no commercial use.
- **Reads**: {reads}
  Training cut it to its newest {most} tokens; `reply` reads 512 (`max_source_tokens`).
- **Decodes**: as generation_config.json says.
- **Made by**: `{command}`, commit {commit}.
- **Limits**: a small model. It is no therapist and no crisis line, asks about things that it has already been
  told, and can be wrong or unkind. `reply` answers messages that seem to
  speak of danger with a fixed text.

{numbers}

With transformers and PEFT: `empax.load("{base}").save("BASE")` writes the base model in their format; then
`peft.PeftModel.from_pretrained(AutoModel….from_pretrained("BASE"), "weights/{name}")`.
"""
_READS = {
    True: "a chat of user and assistant, by the model's own template.",
    False: 'one text: the turns of a conversation with " | " between them, the newest last.',
}


def options(*, prompted: bool) -> dict[str, Any]:
    """Returns the published decoding options; `prompted`: of SmolLM2, which reads "I'm" as two tokens, T5 as three."""
    chosen = {"no_repeat_ngram_size": 3, "min_new_tokens": 8} if prompted else {"no_repeat_ngram_size": 4}
    return {"num_beams": 4, **chosen, "max_new_tokens": 40}


def publish(workdir: Path, output: Path, decode: Mapping[str, Any] | None = None) -> str:
    """Writes the folder; returns a line that describes it. `decode` replaces `options`.

    Raises:
      ConfigError: the run has no adapters, or `output` is not empty.
      CheckpointError: the run has not been trained.
    """
    found = trained_model(workdir, ExportSettings(lora="adapters"))
    if found.lora is None:
        raise ConfigError(f"{workdir} has trained no adapters; give a run of configs/published.py.")
    fields = load_config(resolve(found.base))
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf, ml_dtypes.bfloat16), found.params)
    t = found.tokenizer
    model = found.model
    prompted = isinstance(model, DecoderOnly)
    ids = {"decoder_start_token_id": model.config.start_id} if isinstance(model, EncoderDecoder) else {}
    chosen = options(prompted=prompted) if decode is None else decode
    written = {**ids, "eos_token_id": t.eos_id, "pad_token_id": t.pad_id, **chosen}
    generation = Generation({}, t.start_id, t.eos_id, t.pad_id, written=written)
    config = read_json(workdir / "config.json")
    learnt = math.prod(config["generator"][name] for name in ("steps", "batch_size"))
    report = read_json(workdir / _REPORT) if (workdir / _REPORT).is_file() else None
    run = report["run"] if report else read_json(workdir / "run.json")
    card = _CARD.format(
        name=output.name, base=found.base, rank=found.lora.rank, reads=_READS[prompted], commit=run["commit"],
        rows="all its 40,290 replies" if learnt >= 40_290 else f"{learnt:,} of its 40,290 replies",
        command=f"python -m empax.main --config=configs/published.py:{output.name} --config.data.dir=DATA",
        most=config[config["system"]]["layout"]["max_context_tokens"], numbers=numbers(report) if report else "",
    )  # fmt: skip
    export_adapters(
        output, fields["model_type"], rounded, found.model.config, found.lora, base=found.base,
        generation=generation, card=card,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in output.iterdir())
    return f"wrote {output}, {size / 1e6:.1f} MB"


def numbers(report: Mapping[str, Any]) -> str:
    """Returns the metrics of a report, and how its replies were decoded: not as `options` say."""
    rows = []
    for name in _METRICS:
        cells = (format_value(name, report["metrics"][name][key]) for key in ("value", "low", "high"))
        rows.append([metric_title(name), "{} ({}–{})".format(*cells)])
    about = describe(report["rows"], _METRICS, corpus=report["test_set"]["corpus"])
    decoding = json.dumps(report["config"][report["system"]]["decoding"])
    decoded = f"The replies were decoded by the recipe, `{decoding}`; `reply` decodes as generation_config.json says."
    return "\n".join([*markdown_table(["", "test split"], rows), "", decoded, about])


@in_one_line
def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.publish", description="Writes a folder of weights/.")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--decode", type=json.loads, help="other decoding options, as JSON")
    given = parser.parse_args(argv)
    print(publish(expand(given.workdir), expand(given.output), given.decode))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
