"""Every file that a setting names by its path is among what its stage is known to read."""

import importlib
from pathlib import Path

import pytest

from empax.core.files import WorkDir
from empax.core.inputs import Input
from empax.data import epitome
from empax.data.empathetic_dialogues import ARCHIVE_NAME, ARCHIVE_SHA256, ARCHIVE_URL
from empax.parts.exemplars import dense_retrieval
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain
from tests.plans import changed

pytestmark = pytest.mark.usefixtures("no_data_dir")


def inputs_of(config, tmp_path):
    return run.find_inputs(make_plan(config), WorkDir(tmp_path / "run"))


def recipe(name, form=""):
    tiny = "" if name == "lempex_retriever" else "tiny"
    return plain(importlib.import_module(f"configs.{name}").get_config(",".join(filter(None, (form, tiny)))))


EPITOME = [f"{epitome.FOLDER}/{name}" for name in epitome.FILES.values()]
WORDNET = ["cntlist.rev", *(f"index.{part}" for part in ("noun", "verb", "adj", "adv")), "data.noun", "data.adj"]
NAMED = {
    "own corpus": (("reg_transformer", "prepare", "the corpus"), {"data.name": "jsonl", "data.dir": "GIVEN"},
        ["train.jsonl", "validation-0.jsonl", "validation-1.jsonl", "test.jsonl"]),
    "one file": (("reg_transformer", "prepare", "the corpus"), {"data.name": "jsonl", "data.dir": "GIVEN/all.jsonl"},
        ["all.jsonl"]),
    "corpus of a judge": (("lempex", "sentiment", "the corpus"), {"data.name": "jsonl", "data.dir": "GIVEN"},
        ["train.jsonl", "validation.jsonl", "test.jsonl"]),
    "archive": (("reg_transformer", "prepare", "EmpatheticDialogues"),
        {"data.name": "empathetic_dialogues", "data.dir": "GIVEN"}, [f"empathetic_dialogues/{ARCHIVE_NAME}"]),
    "EPITOME": (("reg_transformer", "attributes", "EPITOME"), {"attributes.data": "epitome", "data.dir": "GIVEN"},
        EPITOME),
    "linear judge": (("reg_transformer", "evaluate", "EPITOME"), {"evaluate.linear_judge": True, "data.dir": "GIVEN"},
        EPITOME),
    "DailyDialog": (("reg_transformer", "evaluate", "DailyDialog, test"),
        {"evaluate.corpus": "dailydialog", "data.dir": "GIVEN"}, ["dailydialog/dialogues_test.txt"]),
    "peers": (("reg_transformer", "report", "the outputs of other systems"), {"report.peers": "GIVEN"},
        ["a.jsonl", "b.jsonl"]),
    "encoder": (("reg_transformer", "index", "the model 'GIVEN'"), {"reg.retriever.pretrained": "GIVEN"},
        ["config.json", "model.safetensors"]),
    "embeddings": (("reg_transformer", "generator", "the model 'GIVEN'"), {"reg.generator.embeddings": "GIVEN"},
        ["model.safetensors"]),
    "generator": (("reg_t5", "generator", "the model 'GIVEN'"), {"reg.generator.pretrained": "GIVEN"},
        ["model.safetensors"]),
    "tokenizer": (("reg_t5", "prepare", "the tokenizer 'GIVEN'"), {"prepare.tokenizer.pretrained": "GIVEN"},
        ["tokenizer.json", "tokenizer_config.json", "spiece.model"]),
    "judge's encoder": (("reg_transformer", "attributes", "the model 'GIVEN'"),
        {"attributes.encoder.pretrained": "GIVEN"}, ["model.safetensors"]),
    "BARTScore": (("reg_transformer", "evaluate", "the model 'GIVEN'"), {"evaluate.bart_score": "GIVEN"},
        ["config.json"]),
    "vectors": (("classic", "generator", "the vectors 'GIVEN/a.txt'"), {"classic.vectors": "GIVEN/a.txt"}, ["a.txt"]),
    "lexicon": (("classic:empdg", "generator", "the lexicon 'GIVEN/a.txt'"), {"classic.lexicon": "GIVEN/a.txt"},
        ["a.txt"]),
    "facts": (("nec", "knowledge", "the facts 'GIVEN/f-{split}.jsonl', test"),
        {"knowledge.social": {"source": "file", "path": "GIVEN/f-{split}.jsonl"}},
        ["f-test.jsonl", "f-train.jsonl", "f-validation.jsonl"]),
    "ATOMIC": (("nec", "knowledge", "ATOMIC"), {"knowledge.social": {"source": "atomic"}, "data.dir": "GIVEN"},
        ["knowledge/v4_atomic_trn.csv", "knowledge/v4_atomic_dev.csv.gz"]),
    "encoder of events": (("nec", "knowledge", "the model 'GIVEN/encoder'"),
        {"knowledge.social": {"source": "atomic", "path": "GIVEN", "encoder": {"pretrained": "GIVEN/encoder"}}},
        ["v4_atomic_trn.csv", "encoder/model.safetensors"]),
    "selector": (("nec", "generator", "the model 'GIVEN'"), {"nec.selector.pretrained": "GIVEN"},
        ["model.safetensors"]),
    "WordNet": (("nec", "knowledge", "WordNet"),
        {"knowledge.entity": {"source": "wordnet", "path": "GIVEN"}, "knowledge.social": None}, WORDNET),
    "COMET": (("nec", "knowledge", "the model 'GIVEN'"), {"knowledge.social": {"source": "comet", "path": "GIVEN"}},
        ["model.safetensors"]),
    "spans": (("reflectdiffu", "reasons", "the spans, train"), {"reasons.data": "file", "reasons.spans": "GIVEN"},
        ["train.jsonl", "validation.jsonl"]),
    "RECCON": (("reflectdiffu", "reasons", "RECCON"), {"reasons.data": "reccon", "data.dir": "GIVEN"},
        [f"emotion_causes/reccon_dailydialog_{split}.json" for split in ("train", "valid", "test")]),
    "intents": (("reflectdiffu", "intents", "the intents of EmpatheticDialogues"),
        {"data.name": "empathetic_dialogues", "data.dir": "GIVEN"}, ["listener_intents.csv"]),
    "LEMPEx' pairs": (("lempex_retriever", "retriever", "LEMPEx' pairs of Reddit"),
        {"retriever.dpr_data": "ed_reddit", "data.dir": "GIVEN"},
        [f"{dense_retrieval.FOLDER}/{name}" for name in dense_retrieval.FILES.values()]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_files_that_settings_name_are_known_by_their_contents(name, tmp_path):
    (recipe_name, stage, what), changes, files = NAMED[name]
    given = tmp_path / "given"
    for file in files:
        path = given / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"one {file}")
    recipe_name, _, form = recipe_name.partition(":")
    config = recipe(recipe_name, form)
    config = changed(config, {path: placed(value, given) for path, value in changes.items()})
    what = placed(what, given)
    found = inputs_of(config, tmp_path)[stage]
    assert what in found, sorted(found)
    read = {Path(found[what].path, name) for name in found[what].files}
    assert read
    assert read <= {given / file for file in files}
    max(read).write_text("two")
    assert found[what].difference(inputs_of(config, tmp_path)[stage][what])


def placed(value, given):
    if isinstance(value, dict):
        return {name: placed(item, given) for name, item in value.items()}
    return value.replace("GIVEN", str(given)) if isinstance(value, str) else value


def test_a_corpus_that_is_downloaded_is_known_before_it_is_there(tmp_path):
    config = recipe("reg_transformer")
    config["data"] = {"name": "empathetic_dialogues"}
    found = inputs_of(config, tmp_path)["prepare"]
    assert found == {"EmpatheticDialogues": Input(ARCHIVE_URL, {"": ARCHIVE_SHA256})}


def test_what_is_not_there_is_left_out_and_refuses_nothing(tmp_path):
    config = recipe("reg_transformer")
    config["data"] = {"name": "jsonl", "dir": str(tmp_path / "nowhere")}
    config["attributes"]["data"] = "epitome"
    found = inputs_of(config, tmp_path)
    assert set(found) == set(config["run"])
    assert "the corpus" not in found["prepare"]
    assert "EPITOME" not in found["attributes"]


def test_the_files_of_a_hub_model_are_known_once_they_were_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = changed(recipe("reg_transformer"), {"reg.retriever.pretrained": "someone/encoder"})
    place, what = tmp_path / "models--someone--encoder", "the model 'someone/encoder'"

    def after(commit, **files):
        folder = place / "snapshots" / commit
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        return inputs_of(config, tmp_path)["index"][what]

    assert what not in inputs_of(config, tmp_path)["index"]  # nothing is downloaded to find out
    before = after("a" * 40, config_json="{}", model_safetensors="one")
    assert set(before.files) == {"config.json", "model.safetensors"}
    assert not before.difference(after("b" * 40, config_json="{}", model_safetensors="one", README_md="new"))
    assert "model.safetensors" in before.difference(after("c" * 40, config_json="{}", model_safetensors="two"))
