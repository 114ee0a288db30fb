"""Each system of MoEL's lineage, from a corpus to a report."""

import pytest

from configs.classic import FORMS
from empax.core.files import read_json, read_jsonl
from empax.core.types import EMOTIONS
from tests.end_to_end.promises import assert_gold_is_not_read


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_tiny_run(name, command, tmp_path):
    made = command("-m", "empax", "run", f"--config=classic:{name},tiny", f"--workdir={tmp_path}")
    assert made.returncode == 0, made.stderr[-3000:]
    rows = list(read_jsonl(tmp_path / "predictions.jsonl"))
    assert len(rows) == 62
    assert not any("<unk>" in row["response"] for row in rows)
    metrics = read_json(tmp_path / "report.json")["metrics"]
    assert metrics["perplexity"]["value"] > 1
    assert ("emotion_accuracy" in metrics) == (name != "transformer")
    if name == "emo_prepend":
        assert {row["notes"]["prepended"] for row in rows} <= set(EMOTIONS)
    assert_gold_is_not_read(tmp_path)
    refused = command("-m", "empax", "export", f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}")
    assert refused.returncode == 2
    assert "can be exported; it trains classic.generator" in refused.stderr
