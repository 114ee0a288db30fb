"""The stage "knowledge": facts of every instance, where they are from, and the control that exchanges them."""

import dataclasses

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError, WorkDir, read_json, read_jsonl, write_jsonl
from empax.core.system import RunContext
from empax.core.types import Instance
from empax.data.dialogues import instance_to_row
from empax.data.knowledge import Fact, facts_of
from empax.data.store import load_instances
from empax.parts.knowledge.finder import find_finder, with_facts
from empax.parts.knowledge.settings import SourceSettings
from empax.pipeline import knowledge
from empax.reporting.findings import count_instances
from tests.data import small_wordnet
from tests.plans import plan_of

SPLITS = ("train", "validation", "test")


@pytest.fixture
def run(tmp_path, own_cache):
    plan = plan_of({"prepare": {"kind": "prepare"}, "facts": {"kind": "knowledge", "social": {"source": "sample"}}})
    context = RunContext(WorkDir(tmp_path / "run"), plan, "facts")
    for split in SPLITS:
        texts = ("I lost my dog.", "We ran.", "My knife is gone.", "A dog!")
        rows = [Instance(f"{split}-{i}#2", (text,), f"gold {split}", "sad") for i, text in enumerate(texts)]
        write_jsonl(context.files.instances(split), map(instance_to_row, rows))
    return context


def file_of_facts(folder):
    for split in SPLITS:
        rows = [{"id": f"{split}-{i}#2", "source": "us",
                 "facts": [Fact("it", "xReact", f"mood {i}").row(), Fact("dog", "IsA", "pet").row()] if i else []}
                for i in range(4)]  # fmt: skip
        write_jsonl(folder / f"{split}.facts.jsonl", rows)
    return SourceSettings("file", str(folder / "{split}.facts.jsonl"))


def told(run, split="test"):
    return [[(fact.relation, fact.tail) for fact in facts_of(i)] for i in load_instances(run.at("later"), split)]


def test_facts_become_notes_with_their_source_and_reports_count_them(run, tmp_path):
    wordnet = SourceSettings("wordnet", str(small_wordnet.write(tmp_path / "wordnet")))
    knowledge.run(knowledge.Settings(social=file_of_facts(tmp_path), entity=wordnet), run)
    found = told(run)
    assert found[0] == [("IsA", "animal"), ("MadeUpOf", "tail"), ("AtLocation", "pack")]
    assert found[1] == [("xReact", "mood 1")]  # "us" knows of things too, but is asked about people alone
    assert found[2][:2] == [("xReact", "mood 2"), ("IsA", "hand tool")]
    row = next(iter(read_jsonl(run.files.notes("facts", "test"))))
    assert set(row) == {"id", "facts", "source"}
    assert row["source"] == "us, file {split}.facts.jsonl; WordNet"
    about = count_instances(run.files, ["facts"])["facts"]
    assert about["source"] == row["source"]
    assert about["test"]["with_facts"] == 1.0
    assert about["test"]["relations"]["IsA"] == 3
    assert about == read_json(run.directory / "knowledge.json")


def test_exchanged_facts_are_named_and_belong_to_others(run, tmp_path):
    settings = knowledge.Settings(social=file_of_facts(tmp_path))
    knowledge.run(settings, run)
    real = told(run)
    knowledge.run(dataclasses.replace(settings, shuffled=True), run)
    control = told(run)
    assert control != real
    assert sorted(map(str, control)) == sorted(map(str, real))
    assert control[0] == [] == real[0]
    assert read_json(run.directory / "knowledge.json")["source"].endswith("; tails exchanged between dialogues")


def test_the_control_exchanges_the_facts_of_another_corpus_and_not_those_of_a_chat(run, tmp_path):
    wordnet = {"source": "wordnet", "path": str(small_wordnet.write(tmp_path / "wordnet"))}
    facts = {"kind": "knowledge", "entity": wordnet, "shuffled": True}
    plan = plan_of({"prepare": {"kind": "prepare"}, "facts": facts})
    finder = find_finder(dataclasses.replace(run, plan=plan, stage="later"))

    def kinds(*names):
        texts = ("A dog!", "My knife is gone.")
        asked = [Instance(f"{name}#2", (text,), "", "") for name, text in zip(names, texts, strict=True)]
        return [next(f.tail for f in facts_of(i) if f.relation == "IsA") for i in with_facts(lambda: finder, asked)]

    assert kinds("one", "two") == ["hand tool", "animal"]
    assert kinds("chat", "chat") == ["animal", "hand tool"]


def test_other_gold_responses_change_no_fact(run, tmp_path):
    settings = knowledge.Settings(entity=SourceSettings("wordnet", str(small_wordnet.write(tmp_path / "wordnet"))))
    knowledge.run(settings, run)
    before = run.files.notes("facts", "test").read_text()
    path = run.files.instances("test")
    rows = [{**row, "response": "My knife bites every animal.", "emotion": "proud"} for row in read_jsonl(path)]
    write_jsonl(path, rows)
    knowledge.run(settings, run)
    assert run.files.notes("facts", "test").read_text() == before


def test_what_has_been_found_is_found_in_the_cache(run, tmp_path, monkeypatch):
    settings = knowledge.Settings(entity=SourceSettings("wordnet", str(small_wordnet.write(tmp_path / "wordnet"))))
    knowledge.run(settings, run)
    before = run.files.notes("facts", "train").read_text()
    monkeypatch.setattr("empax.parts.knowledge.sources.Things.find", None)
    knowledge.run(settings, run)
    assert run.files.notes("facts", "train").read_text() == before


def test_the_check_names_what_is_missing_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.delenv("EMPAX_DATA_DIR", raising=False)

    def problem(**sources):
        with pytest.raises((ConfigError, DataError)) as caught:
            knowledge.check(knowledge.Settings(**sources), run)
        return str(caught.value)

    assert "nothing says where ATOMIC's files are; set path" in problem(social=SourceSettings("atomic"))
    assert "name the folder of ATOMIC's files" in problem(social=SourceSettings("atomic", str(tmp_path)))
    assert "has no cntlist.rev" in problem(entity=SourceSettings("wordnet", str(tmp_path)))
    assert "for the split 'train'" in problem(social=SourceSettings("file", str(tmp_path / "{split}.jsonl")))
    wordnet = SourceSettings("wordnet", str(tmp_path))
    assert (
        "config.facts.social.source = 'wordnet' has facts about things, not about people; set it under entity"
        in problem(social=wordnet)
    )
    comet = SourceSettings("comet", "folder", clauses=True)
    assert (
        "config.facts.entity.clauses = True, but facts about things are found for whole contexts; leave it out"
        in problem(entity=comet)
    )
    assert "'llm' has facts about people" in problem(entity=SourceSettings("llm", "smollm2"))
    assert "smollm2 is not an encoder-decoder; source" in problem(social=SourceSettings("comet", "smollm2"))
    t5 = SourceSettings("llm", "flan-t5-small-titles")
    assert "flan-t5-small-titles is not a decoder-only model; source" in problem(social=t5)
    with pytest.raises(ConfigError, match="no stage 'prepare' before"):
        knowledge.check(knowledge.Settings(entity=wordnet), dataclasses.replace(run, stage="prepare"))


def test_settings_that_name_nothing_are_refused():
    with pytest.raises(ConfigError, match="leaves nothing to find"):
        knowledge.Settings()
    with pytest.raises(ConfigError, match=r"source = 'comet' needs path: the folder of a COMET"):
        SourceSettings("comet")
    with pytest.raises(ConfigError, match="source = 'sample' queries no clauses, only atomic, comet, llm"):
        SourceSettings("sample", clauses=True)
