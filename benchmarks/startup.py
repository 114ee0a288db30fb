"""Time from the command to the end of the first training step: `empax.main` against a script in eager PyTorch.

Cold: with an empty compilation cache; warm: with the cache of an earlier start, as in every later start of a recipe.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paired import Row, arguments, in_turns, report

HELD_EQUAL = (
    "a fresh Python process for every measurement, in turns, on the CPU",
    "the built-in sample, a byte-pair vocabulary of 3,000 trained in the process, an encoder-decoder of the same sizes "
    "with random weights, 32 examples, one update of AdamW",
    "ours: `python -m empax.main` with a recipe of a generator alone, preparation included, until its first row of "
    "metrics is written",
    "theirs: T5ForConditionalGeneration in eager PyTorch, nothing compiled, the corpus as plain JSON lines",
)

_THEIRS = """
import json, sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import T5Config, T5ForConditionalGeneration

pairs = []
for line in open(sys.argv[1], encoding="utf-8"):
    turns = [turn["text"] for turn in json.loads(line)["utterances"]]
    pairs += [(" ".join(turns[:i]), turns[i]) for i in range(1, len(turns), 2)]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.train_from_iterator([t for pair in pairs for t in pair], trainers.BpeTrainer(vocab_size=3000))
size, layers = int(sys.argv[2]), int(sys.argv[3])
config = T5Config(vocab_size=3000, d_model=size, d_kv=64, d_ff=4 * size, num_layers=layers, num_heads=size // 64,
                  decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def padded(texts, limit):
    rows = [one.ids[:limit] for one in tokenizer.encode_batch(texts)]
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    for row, found in zip(ids, rows):
        row[: len(found)] = torch.tensor(found)
    return ids

batch = pairs[:32]
source, target = padded([one for one, _ in batch], 64), padded([one for _, one in batch], 40)
loss = model(input_ids=source, attention_mask=(source > 0).long(), labels=target.masked_fill(target == 0, -100)).loss
loss.backward()
optimizer.step()
print("stepped", float(loss), flush=True)
"""

_RECIPE = """
from configs import reg_transformer

def get_config():
    config = reg_transformer.get_config("no_retrieval")
    config.data.name = "sample"
    config.run = ("prepare", "generator")
    config.prepare.tokenizer.vocab_size = 3000
    config.reg.generator.update({{"d_model": {size}, "num_heads": {size} // 64, "d_ff": 4 * {size}, "embeddings": "",
                                 "num_encoder_layers": {layers}, "num_decoder_layers": {layers}, "dtype": "float32"}})
    config.generator.update({{"steps": 1, "log_every_steps": 1, "max_validation_examples": 1, "buckets": (72,),
                             "best_metric": None}})
    del config.evaluate, config.longer, config.report
    return config
"""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=3)
    parser.add_argument("--size", type=int, default=256, help="width of a state (256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of encoder and decoder (4)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.size, options.layers, options.rounds = 64, 1, 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = {}
        for name in ("cold", "warm"):
            pairs = in_turns(
                lambda number, name=name: ours(folder, f"{name}{number}", options, warm=name == "warm"),
                lambda _: theirs(folder, options),
                options.rounds,
            )
            rows[name] = Row([pair[0] for pair in pairs], [pair[1] for pair in pairs], "seconds")
    return report("startup", rows, HELD_EQUAL, smoke=options.smoke)


def ours(folder: Path, name: str, options: argparse.Namespace, *, warm: bool) -> float:
    recipe, cache = folder / "recipe.py", folder / ("cache" if warm else f"cache-{name}")
    recipe.write_text(_RECIPE.format(size=options.size, layers=options.layers), encoding="utf-8")
    if warm and not cache.exists():
        _ours(recipe, folder / "first", cache)
    return _ours(recipe, folder / name, cache)


def _ours(recipe: Path, workdir: Path, cache: Path) -> float:
    command = [sys.executable, "-m", "empax.main", f"--config={recipe}", f"--workdir={workdir}"]
    rows = workdir / "metrics.jsonl"
    return _until(command, {"EMPAX_CACHE_DIR": str(cache)}, lambda: rows.exists() and rows.stat().st_size > 0)


def theirs(folder: Path, options: argparse.Namespace) -> float:
    script, said = folder / "theirs.py", folder / "said.txt"
    script.write_text(_THEIRS, encoding="utf-8")
    said.unlink(missing_ok=True)
    corpus = _ROOT / "empax" / "data" / "sample.jsonl"
    command = [sys.executable, str(script), str(corpus), str(options.size), str(options.layers)]
    return _until(command, {}, lambda: said.exists() and "stepped" in said.read_text(encoding="utf-8"), said)


_ROOT = Path(__file__).resolve().parent.parent


def _until(command: Sequence[str], environment: dict[str, str], happened: Any, output: Path | None = None) -> float:
    """Returns the seconds from the start of a process until `happened`; waits for its end."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", **environment}
    with tempfile.TemporaryFile() as errors, (output or Path(os.devnull)).open("w") as said:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=errors)
        try:
            while not happened():
                if process.poll() is not None and not happened():
                    errors.seek(0)
                    raise RuntimeError(f"{command[1]} ended too early:\n{errors.read()[-2000:].decode()}")
                time.sleep(0.01)
            return time.perf_counter() - begin
        finally:
            process.wait()  # its compiled programs are then on disk


if __name__ == "__main__":
    main()
