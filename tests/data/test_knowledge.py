"""Facts: what a file of them must be, how they are said, and the control that exchanges them."""

import json

import pytest

from empax.core.files import DataError
from empax.core.types import Instance
from empax.data import sample
from empax.data.dialogues import to_instances
from empax.data.knowledge import (
    ENTITY_RELATIONS,
    SOCIAL_RELATIONS,
    Fact,
    describe,
    exchanged,
    facts_of,
    ranked,
    read_knowledge,
)  # fmt: skip

INSTANCES = [Instance(f"d{i}#2", (f"turn {i}",), "yes", "sad") for i in range(2)]
FACT = {"head": "turn 0", "relation": "xReact", "tail": "sad"}


def written(folder, *rows):
    path = folder / "facts.jsonl"
    path.write_text("".join((row if row == "" else json.dumps(row)) + "\n" for row in rows))
    return path


def row(number, *facts, **changes):
    return {"id": f"d{number}#2", "facts": list(facts), "source": "us", **changes}


def test_a_file_comes_back_as_it_was_written(tmp_path):
    facts = [Fact("a dog", "IsA", "animal", 1, 0.25), Fact("turn 0", "xReact", "sad")]
    known = read_knowledge(written(tmp_path, row(0, *(f.row() for f in facts)), row(1), row(7)), INSTANCES)
    assert known.source == "us"
    assert known.facts["d0#2"] == facts
    assert known.facts["d1#2"] == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(0)], "lacks 1 of 2 instances, the first is d1#2; give each a line"),
        ([row(0), "", row(0)], r"line 3: id = 'd0#2' must be a text unique to this line"),
        ([row(0, source=" "), row(1)], r"line 1: source = ' ' must say who made the facts"),
        ([row(0), row(1, source="them")], r"line 2: source = 'them', but the first line has 'us'"),
        ([{"id": "d0#2", "source": "us"}], "line 1: facts are missing"),
        ([row(0, notes=1)], "unknown field 'notes'; a line has id, facts and source"),
        ([row(0, facts="none")], "line 1: facts = 'none' must be a list"),
        ([row(0, "sad")], r"line 1, fact 1: 'sad' must be an object with head, relation and tail"),
        ([row(0, {**FACT, "tail": ""})], r"fact 1: tail = '' must be a text that is not blank"),
        ([row(0, FACT, {**FACT, "weight": 1})], "fact 2: unknown field 'weight'; a fact has head"),
        ([row(0, {**FACT, "relation": "is a"})], "relation = 'is a' must be a name of letters, such as xReact"),
        ([row(0, {**FACT, "rank": -1})], "rank = -1 must be a whole number of at least 0"),
        ([row(0, {**FACT, "rank": True})], "rank = True must be a whole number"),
        *(([row(0, {**FACT, "score": score})], f"score = {score!r} must be a number") for score in ("high", True)),
    ],
)
def test_what_is_no_file_of_facts_is_refused_with_its_place(rows, said, tmp_path):
    with pytest.raises(DataError, match=said):
        read_knowledge(written(tmp_path, *rows), INSTANCES)


def test_facts_are_said_as_nec_says_them():
    assert Fact("knife", "ObjectUse", "cutting bread.").words() == "knife is used for cutting bread"
    assert Fact("I won", "xReact", "happy").words() == "As a result, I feel happy."
    assert Fact("I won", "xWant", "to celebrate").words() == "As a result, I want to celebrate."
    assert Fact("dog", "CapableOf", "bark").words() == "dog CapableOf bark"
    assert Fact("knife", "ObjectUse", "cutting bread").triple() == "knife, ObjectUse, cutting bread"
    assert all(Fact("I won", relation, "x").social for relation in SOCIAL_RELATIONS)
    assert not any(Fact("dog", relation, "x").social for relation in (*ENTITY_RELATIONS, "IsA", "RelatedTo"))


def test_facts_that_say_nothing_and_repetitions_are_dropped_and_ranks_count_a_relation():
    tails = ["none", "Sad ", "sad", "i lost it", "", "hurt", "tired"]
    found = ranked([Fact("I lost it", "xReact", tail) for tail in tails] + [Fact("I lost it", "xWant", "sad")], most=2)
    assert [(fact.relation, fact.tail, fact.rank) for fact in found] == [
        ("xReact", "Sad", 0), ("xReact", "hurt", 1), ("xWant", "sad", 0),
    ]  # fmt: skip


def test_exchanged_facts_have_their_heads_and_another_dialogues_tails_of_that_relation_and_rank():
    asked = [Instance(f"d{d}#{n}", ("x",), "", "") for d in range(8) for n in (2, 4)]
    rows = [
        [
            Fact(f"head {k}", relation, f"{relation} {rank} of {i.dialogue_id}", rank, float(k))
            for relation, most in (("xReact", 2), ("IsA", n % 3))
            for rank in range(most)
            for k in range(1 + n % 2)
        ]
        for n, i in enumerate(asked)
    ]
    found = exchanged(asked, rows)
    for instance, own, given in zip(asked, rows, found, strict=True):
        assert [(f.head, f.relation, f.rank) for f in given] == [(f.head, f.relation, f.rank) for f in own]
        assert all(f.tail.startswith(f"{f.relation} {f.rank} of ") for f in given)
        assert not any(f.tail.endswith(instance.dialogue_id) for f in given)
    tails = [sorted((f.tail, f.score) for facts in side for f in facts) for side in (rows, found)]
    assert tails[0] == tails[1]
    assert exchanged(asked, rows) == found
    assert exchanged(asked[:2], rows[:2]) == rows[:2]  # nobody to exchange with


def test_a_description_counts_facts_and_the_share_of_instances_that_have_some():
    found = describe([[Fact("a", "xReact", "sad"), Fact("a", "xWant", "home")], [], [Fact("b", "xReact", "glad")]])
    assert found == {"instances": 3, "facts": 3, "with_facts": 0.6667, "relations": {"xReact": 2, "xWant": 1}}


def test_notes_become_facts_and_no_notes_none():
    assert facts_of(INSTANCES[0]) == facts_of(Instance("a#2", ("x",), "", "", {"facts": []})) == []
    assert facts_of(Instance("a#2", ("x",), "", "", {"facts": [FACT]})) == [Fact("turn 0", "xReact", "sad")]
    with pytest.raises(DataError, match="instance 'a#2': facts"):
        facts_of(Instance("a#2", ("x",), "", "", {"facts": "sad"}))


def test_forty_instances_of_the_sample_have_facts_about_what_they_say():
    known = sample.load_facts()
    texts = {i.id: i for dialogues in sample.load_dialogues().values() for i in to_instances(dialogues)}
    assert len(known) == 40
    assert set(known) < set(texts)
    for split, dialogues in sample.load_dialogues().items():
        assert sum(i.id in known for i in to_instances(dialogues)) >= 4, split
    for name, facts in known.items():
        assert facts == ranked(facts)  # none says nothing, or stands twice
        context = texts[name].context[-1]
        assert all(fact.head == context for fact in facts if fact.social)
        assert all(fact.head[:-1].lower() in context.lower() for fact in facts if not fact.social)
        assert {fact.relation for fact in facts} <= {*SOCIAL_RELATIONS, *ENTITY_RELATIONS}
        assert any(fact.social for fact in facts)
