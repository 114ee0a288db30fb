"""A pretrained folder and a file of pairs, to an exported model."""

import json

import pytest

import empax
from empax.core.files import read_json, read_jsonl


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", ",lora"])
def test_a_folder_learns_pairs_and_is_exported(form, command, t5, tmp_path):
    file, run, output = tmp_path / "pairs.jsonl", tmp_path / "run", tmp_path / "model"
    file.write_text(
        "".join(json.dumps({"source": f"say {i % 20}", "target": f"{i % 20} it is"}) + "\n" for i in range(60))
    )
    small = ["--config.generator.steps=6", "--config.generator.batch_size=8", "--config.generator.buckets=(32,)",
             "--config.evaluate.buckets=(32,)", "--config.seq2seq.layout.max_context_tokens=32",
             "--config.seq2seq.decoding.max_tokens=6"]  # fmt: skip
    words = [f"--config=finetune:{t5}{form}", f"--config.data.dir={file}", f"--workdir={run}", *small]
    made = command("-m", "empax", "run", *words)
    assert made.returncode == 0, made.stderr[-3000:]
    rows = list(read_jsonl(run / "predictions.jsonl"))
    assert len(rows) == 6
    assert all(row["context"][0].startswith("say ") for row in rows)
    assert read_json(run / "report.json")["metrics"]["perplexity"]["value"] > 1
    written = command("-m", "empax", "export", f"--workdir={run}", f"--output={output}")
    assert written.returncode == 0, written.stderr[-3000:]
    exported, own = (empax.load(folder).nll(["say 1"], ["1 it is"]).nll[0] for folder in (output, run))
    assert own == pytest.approx(exported, rel=1e-5)
