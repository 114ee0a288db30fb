"""REG on a T5 that lies in a folder, in small: all stages."""

import pytest
import torch
import transformers

from empax.core.files import read_json, read_jsonl
from empax.serving.export import ExportSettings, export_run
from empax.serving.session import Session


@pytest.mark.slow
def test_the_recipe_trains_a_t5_and_its_encoder_as_classifier(recipe, tmp_path, t5):
    workdir = tmp_path / "run"
    recipe(workdir, config=f"configs/reg_t5.py:{t5},tiny")
    predictions = list(read_jsonl(workdir / "predictions.jsonl"))
    assert all(len(row["exemplars"]) == 2 and row["attributes"] for row in predictions)
    metrics = read_json(workdir / "report.json")["metrics"]
    assert {"bleu_2", "perplexity", "exemplar_emotion_match", "emotion_accuracy", "empathy_f1"} <= set(metrics)
    assert Session.load(workdir).reply(["I lost my dog."]).exemplars

    export_run(workdir, workdir / "exported", ExportSettings(stage="generator"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(workdir / "exported")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(workdir / "exported")
    with torch.no_grad():
        made = model.generate(**tokenizer(["I lost my dog."], return_tensors="pt"), max_new_tokens=5)
    assert made.shape[0] == 1
