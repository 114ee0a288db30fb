"""From a corpus to instances and a tokenizer."""

import dataclasses

import pytest

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir, hash_file, read_json
from empax.core.settings import DataSettings
from empax.core.system import RunContext
from empax.data import sample
from empax.data.batches import draw_dialogues
from empax.data.features import SPECIAL_TOKENS
from empax.data.store import load_instances, run_tokenizer
from empax.pipeline import prepare
from tests.plans import plan_of


def context(workdir, **data):
    config = {"seed": 0, "data": {"name": "sample", **data}}
    return RunContext(WorkDir(workdir), plan_of(config), "prepare")


def settings(**values):
    return to_settings(prepare.Settings, values, where="config.prepare")


def test_the_sample_becomes_instances_counts_and_a_tokenizer(tmp_path):
    run = context(tmp_path)
    prepare.run(settings(tokenizer={"vocab_size": 500}), run)
    counts = read_json(tmp_path / "prepare" / "counts.json")
    assert counts == {
        "train": {"dialogues": 256, "instances": 506},
        "validation": {"dialogues": 32, "instances": 57},
        "test": {"dialogues": 32, "instances": 62},
        "source_hash": hash_file(sample.PATH),
    }
    for split, dialogues in sample.load_dialogues().items():
        instances = load_instances(run, split)
        assert len(instances) == counts[split]["instances"]
        assert {i.dialogue_id for i in instances} == {d.id for d in dialogues}
        assert all(set(i.notes) <= {"situation"} for i in instances)
    tokenizer = run_tokenizer(run)
    assert tokenizer.vocab_size == 500
    assert len({tokenizer.token_id(token) for token in SPECIAL_TOKENS}) == len(SPECIAL_TOKENS)
    assert tokenizer.decode(tokenizer.encode("I'm SO sorry, 42 times!")) == "i'm so sorry, 42 times!"


def test_the_tokenizer_learns_from_the_training_split_alone(tmp_path, monkeypatch):
    def learned(workdir):
        prepare.run(settings(tokenizer={"vocab_size": 400}), context(workdir))
        return (workdir / "prepare" / "tokenizer" / "tokenizer.json").read_text()

    splits = sample.load_dialogues()
    first = learned(tmp_path / "one")
    monkeypatch.setattr(sample, "load_dialogues", lambda: {**splits, "test": splits["train"][:5]})
    assert learned(tmp_path / "two") == first
    monkeypatch.setattr(sample, "load_dialogues", lambda: {**splits, "train": splits["train"][:5]})
    assert learned(tmp_path / "three") != first


def test_words_of_turns_and_situations(tmp_path, monkeypatch):
    def words(workdir, **options):
        run = context(workdir)
        prepare.run(settings(tokenizer={"kind": "words", "vocab_size": 9000, "min_count": 1, **options}), run)
        tokenizer = run_tokenizer(run)
        assert {tokenizer.token_id(token) for token in SPECIAL_TOKENS}
        return tokenizer

    splits = sample.load_dialogues()
    told = dataclasses.replace(splits["train"][0], situation="zyzzyva")
    asked = dataclasses.replace(splits["test"][0], situation="quokka")
    made = {**splits, "train": [told, *splits["train"][1:]], "test": [asked, *splits["test"][1:]]}
    monkeypatch.setattr(sample, "load_dialogues", lambda: made)
    own = words(tmp_path / "own")
    assert own.encode("zyzzyva") != [own.unk_id]
    assert own.encode("quokka") == [own.unk_id]
    lineage = words(tmp_path / "lineage", splits_in_vocabulary=("train", "validation", "test"))
    assert lineage.encode("quokka") != [lineage.unk_id]
    often = words(tmp_path / "often", min_count=2)
    assert often.rare_words == own.vocab_size - often.vocab_size > 0


def test_words_are_those_of_the_dialogues_that_are_drawn(tmp_path):
    def words(**data):
        run = context(tmp_path / f"{data}", **data)
        prepare.run(settings(tokenizer={"kind": "words", "vocab_size": 9000, "min_count": 1}), run)
        return run_tokenizer(run), load_instances(run, "train")

    everything, _ = words()
    tokenizer, drawn = words(limit=8)
    said = {word for i in drawn for text in (*i.context, i.response, i.notes["situation"]) for word in text.split()}
    assert tokenizer.vocab_size <= len(said) * 2 + len(SPECIAL_TOKENS) + 1 < everything.vocab_size / 2
    assert all(tokenizer.unk_id not in tokenizer.encode(i.response) for i in drawn)


def test_a_limit_draws_dialogues_of_every_split_and_counts_say_so(tmp_path):
    run = context(tmp_path, limit=5)
    prepare.run(settings(tokenizer={"vocab_size": 300}), run)
    whole = context(tmp_path / "whole")
    prepare.run(settings(tokenizer={"vocab_size": 300}), whole)
    for split in ("train", "validation", "test"):
        some, every = load_instances(run, split), load_instances(whole, split)
        assert some == draw_dialogues(every, 5)
        assert some != every[:5]
        assert read_json(run.directory / "counts.json")[split] | {"dialogues": 0} == {
            "dialogues": 0, "instances": 5, "out_of": len(every), "chosen": "of dialogues drawn at random"
        }  # fmt: skip
        assert "out_of" not in read_json(whole.directory / "counts.json")[split]


def test_moel_compat_reaches_the_extraction(tmp_path):
    run = context(tmp_path, moel_compat=True)
    prepare.run(settings(tokenizer={"vocab_size": 300}), run)
    # Of the built-in corpus no two situations are the same, so it loses the last dialogue of each split, and no more.
    last = sample.load_dialogues()["test"][-1].id
    assert last not in {i.dialogue_id for i in load_instances(run, "test")}
    assert len({i.dialogue_id for i in load_instances(run, "test")}) == 31
    with pytest.raises(ConfigError, match="follows the order of EmpatheticDialogues; set it to False"):
        DataSettings(name="jsonl", moel_compat=True)
    assert not DataSettings(name="jsonl", moel_compat=False).moel_compat
