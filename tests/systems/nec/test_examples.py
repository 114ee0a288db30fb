"""What NEC reads: contexts with facts behind them, facts about people, and candidates by hand."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.types import EMOTIONS, Instance
from empax.data import features, sample
from empax.data.bpe import train_bpe
from empax.data.dialogues import to_instances
from empax.data.exemplars import ContextExamples
from empax.data.knowledge import Fact
from empax.data.sources import LayoutSettings, TaggedForm
from empax.data.tokenizers import SEPARATOR, SubwordTokenizer
from empax.evaluation.text import clauses
from empax.reporting.model_card import Exported, model_card
from empax.systems.nec.examples import (
    FACTS,
    QUERY,
    FactForm,
    NecExamples,
    Negatives,
    facts_read,
    frequent_clauses,
    social_facts,
)

LAYOUT = LayoutSettings(max_context_tokens=24, max_passage_tokens=120, max_target_tokens=16)
KNIFE = Fact("knife", "ObjectUse", "cutting bread")
DOG = Fact("dog", "HasProperty", "loyal")
SAD, HOME = Fact("I lost my dog.", "xReact", "sad"), Fact("I lost my dog.", "xWant", "to go home")


@pytest.fixture(scope="module")
def instances():
    return to_instances(sample.load_dialogues()["train"])


@pytest.fixture(scope="module")
def tokenizer(instances):
    texts = [*(turn for i in instances for turn in (*i.context, i.response)), QUERY, FACTS, KNIFE.words()]
    return train_bpe(texts, vocab_size=500, lowercase=True, special_tokens=features.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def form(tokenizer):
    return FactForm(tokenizer, LAYOUT, attributes=False, facts_as="sentences")


def instance(*facts, context=("I lost my dog.",)):
    return Instance("a#2", context, "Oh no, I am sorry.", "sad", {"facts": [fact.row() for fact in facts]})


def read(form, *given, length=160):
    ids, mask = form.arrays([(text, None) for text in form.contexts(given)], length)
    return [row[m].tolist() for row, m in zip(ids, mask, strict=True)]


def test_a_pretrained_models_frame_stands_around_query_and_facts(tokenizer):
    class Framed(SubwordTokenizer):
        framing = [tokenizer.start_id], [tokenizer.eos_id]

    ours = Framed(tokenizer.backend, pad="<pad>", eos="</s>", start="<s>")
    bare, framed = (FactForm(ours, LAYOUT, False, framed=f, facts_as="sentences") for f in (False, True))
    given = instance(KNIFE)
    (plain,), (row,) = read(bare, given), read(framed, given)
    assert row == [ours.start_id, *plain, ours.eos_id]
    assert framed.lengths(framed.contexts([given]), np.zeros(1))[0] == len(row)
    assert read(framed, given, length=len(row) - 1)[0][-1] == ours.eos_id


def test_facts_about_things_stand_behind_the_context_one_after_the_other(form, tokenizer):
    (row,) = read(form, instance(SAD, KNIFE, DOG))
    separator, encode = tokenizer.token_id(SEPARATOR), tokenizer.encode
    context = features.render_contexts(tokenizer, [("I lost my dog.",)], max_tokens=24)[0]
    assert row == [*encode(QUERY), *context, separator, *encode(FACTS),
                   *encode("knife is used for cutting bread"), separator,
                   *encode("dog can be characterized by being loyal")]  # fmt: skip
    triples = dataclasses.replace(form, facts_as="triples")
    assert read(triples, instance(KNIFE))[0][-len(encode("knife, ObjectUse, cutting bread")) :] == encode(
        "knife, ObjectUse, cutting bread"
    )


def test_without_facts_about_things_there_is_the_query_alone(form, tokenizer):
    context = features.render_contexts(tokenizer, [("I lost my dog.",)], max_tokens=24)[0]
    assert read(form, instance(SAD)) == [[*tokenizer.encode(QUERY), *context]]


def test_the_card_of_an_export_reads_what_a_context_without_facts_is(form, tokenizer):
    about = Exported("generator", "contrastive", "", "", 0, 10, before=QUERY)
    card = model_card(about, {"system": "nec", "data": {"name": "sample"}, "run": (), "seed": 0, "nec": {}}, None)
    (source,) = re.findall(r'tokenizer\("(.*?)", add_special_tokens=False', card)
    assert [tokenizer.backend.encode(source, add_special_tokens=False).ids] == read(
        form, instance(context=("I lost my job.",))
    )
    assert f"A source is `{QUERY}<speaker> … <listener>" in card


def test_a_long_context_loses_its_oldest_tokens_and_a_fact_is_whole_or_absent(form, tokenizer):
    long = ("I lost my dog in the park this morning and then I ran and ran and ran.",)
    full = read(form, instance(KNIFE, context=long))[0]
    cut = read(form, instance(KNIFE, context=long), length=len(full) - 5)[0]
    fact = tokenizer.encode(KNIFE.words())
    assert cut[-len(fact) :] == fact
    assert len(cut) == len(full) - 5
    assert cut[: len(tokenizer.encode(QUERY))] == tokenizer.encode(QUERY)
    one = dataclasses.replace(LAYOUT, max_passage_tokens=len(tokenizer.encode(FACTS)) + 1 + len(fact))
    short = dataclasses.replace(form, layout=one)
    assert read(short, instance(KNIFE, DOG)) == read(form, instance(KNIFE))
    given = instance(SAD, Fact("I lost my dog.", "oReact", "sad"), KNIFE, DOG)
    assert facts_read(short, given) == [SAD, KNIFE]
    assert facts_read(form, given) == [SAD, KNIFE, DOG]
    assert facts_read(TaggedForm(tokenizer, LAYOUT, False), given) == [SAD]
    with pytest.raises(ConfigError, match=r"a bucket of 12 leaves -?[0-9]+ tokens for a context"):
        read(form, instance(KNIFE), length=12)


def test_the_length_of_an_example_is_that_of_its_row(form):
    given = [instance(SAD), instance(KNIFE, DOG), instance(SAD, KNIFE)]
    texts = form.contexts(given)
    assert form.lengths(texts, np.zeros(3)).tolist() == [len(row) for row in read(form, *given)]


def test_the_best_fact_of_each_relation_is_read_in_one_order_and_absent_ones_are_masked(form, tokenizer):
    given = instance(HOME, SAD, Fact("I lost my dog.", "xReact", "hurt"), KNIFE)
    assert social_facts(given) == [SAD, None, None, None, HOME]
    examples = NecExamples([given], form, social_tokens=6)
    found = examples.collate(np.array([0, -1]), 160, np.random.default_rng(0))
    assert found.facts.shape == (2, 5, 6)
    assert found.facts_mask.any(axis=2).tolist() == [[True, False, False, False, True], [False] * 5]
    words = tokenizer.encode(SAD.words())[:6]
    assert found.facts[0, 0, : len(words)].tolist() == words


def test_with_everything_off_examples_are_those_of_every_system(instances, tokenizer):
    tagged = TaggedForm(tokenizer, LAYOUT, attributes=False)
    ours, theirs = NecExamples(instances[:6], tagged), ContextExamples(instances[:6], tagged)
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    one, other = (e.collate(np.array([3, 0, -1]), 60, np.random.default_rng(1)) for e in (ours, theirs))
    for name in ("source", "source_mask", "target", "target_mask", "emotion", "valid"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.facts is None
    assert one.different is one.frequent is one.own is None


def test_frequent_clauses_are_those_of_the_training_split_by_count(instances):
    responses = [i.response for i in instances]
    counts = Counter(c for r in responses for c in clauses(r) if len(c.split()) >= 2)
    found = frequent_clauses(responses, 3)
    assert [counts[c] for c in found] == sorted(counts.values(), reverse=True)[:3]
    assert frequent_clauses(["Oh no! I see.", "Oh no, really?", "Yes."], 2) == ["Oh no", "I see"]


def test_candidates_of_other_emotions_never_have_the_rows_own(instances, tokenizer, form):
    negatives = Negatives.of(instances, tokenizer, 16, different=3, frequent=2)
    by_target: dict[tuple[int, ...], set[str]] = {}
    for i, target in zip(instances, negatives.targets, strict=True):
        by_target.setdefault(tuple(target), set()).add(i.emotion)
    rng, drawn = np.random.default_rng(0), set()
    for emotion in range(len(EMOTIONS)):
        for ids in negatives.draw(emotion, rng):
            assert EMOTIONS[emotion] not in by_target[tuple(ids)]
            drawn |= by_target[tuple(ids)]
    assert len(drawn) > 20  # all emotions have their turn
    assert negatives.draw(-1, rng) == [[]] * 3
    examples = NecExamples(instances[:8], form, negatives=negatives)
    one, same, other = (examples.collate(np.arange(4), 160, np.random.default_rng(s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(one.different, same.different)
    assert (one.different != other.different).any()
    np.testing.assert_array_equal(one.frequent, np.broadcast_to(one.frequent[:1], one.frequent.shape))
    np.testing.assert_array_equal(one.frequent, other.frequent)
    assert examples.collate(np.array([-1]), 160, np.random.default_rng(0)).different_mask.sum() == 0
    with pytest.raises(ConfigError, match=r"fewer than two emotions.*set contrast\.different = 0"):
        Negatives.of([instance()], tokenizer, 16, different=1, frequent=0)


@pytest.mark.parametrize("kind", ["different", "frequent"])
def test_a_kind_that_is_off_is_not_there(kind, instances, tokenizer, form):
    counts = {"different": 2, "frequent": 2, kind: 0}
    examples = NecExamples(instances[:4], form, negatives=Negatives.of(instances, tokenizer, 16, **counts))
    found = examples.collate(np.arange(2), 160, np.random.default_rng(0))
    assert (found.different is None) == (kind == "different")
    assert (found.frequent is None) == (kind == "frequent")
