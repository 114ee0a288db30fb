"""Concepts of words, and intensities."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from empax.core.types import Instance
from empax.data.english import vader_lexicon
from empax.data.knowledge import Fact, exchanged
from empax.data.words import train_words
from empax.systems.classic.concepts import ConceptPicker, ConceptsSettings
from tests.systems.classic.small import rows_of

TOLD = Instance("a#2", ("My dogs ran. I miss my dog.",), "Oh no!", "sad")
FACTS = [
    Fact("dog", "IsA", "domestic animal"), Fact("dog", "RelatedTo", "friend"), Fact("miss", "RelatedTo", "sad"),
    Fact("dog", "HasProperty", "a zyzzyva"), Fact("dog", "AtLocation", "happy with them"), Fact("dog", "IsA", "dog"),
    Fact("dog", "xReact", "happy"), Fact("dog", "IsA", "happy animal"), Fact("cat", "IsA", "animal"),
]  # fmt: skip
WORDS = train_words(
    ["my dogs ran . i miss my dog . oh no ! domestic animal friend sad with them happy cat"], min_count=1
)


def pick(**changes):
    picker = ConceptPicker.of(ConceptsSettings(**changes), WORDS)
    source = [WORDS.cls_id, *WORDS.encode(TOLD.context[0])]
    return [(picker.words[word], picker.words[source[place]]) for word, place in picker(source, FACTS)]


def test_concepts_are_tails_of_facts_about_words_and_the_intense_ones_come_first():
    assert pick() == [("friend", "dogs"), ("sad", "miss"), ("friend", "dog")]  # VADER knows both
    assert pick(each=3) == [
        ("friend", "dogs"), ("animal", "dogs"), ("sad", "miss"), ("friend", "dog"), ("animal", "dog"),
    ]  # fmt: skip
    assert pick(most=2) == [("friend", "dogs"), ("friend", "dog")]  # of valence 2.2, sad of -2.1
    assert pick(least=0.53, each=3) == [("friend", "dogs"), ("friend", "dog")]
    assert pick(most=0) == []


def test_irregular_plurals_have_the_concepts_of_their_singular():
    picker = ConceptPicker.of(ConceptsSettings(), train_words(["my children ran . happy friend"], min_count=1))
    facts = [Fact("child", "RelatedTo", "friend")]
    source = picker.tokenizer.encode("my children ran.")
    assert [(picker.words[i], place) for i, place in picker(source, facts)] == [("friend", 1)]


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (20, [("friend", "dogs"), ("sad", "miss"), ("friend", "dog")]),
        (5, [("sad", "miss"), ("friend", "dog")]),  # [CLS] miss my dog .
    ],
)
def test_rows_have_the_concepts_of_the_words_that_stay(room, expected):
    told = dataclasses.replace(TOLD, notes={"facts": [fact.row() for fact in FACTS]})
    picker = ConceptPicker.of(ConceptsSettings(most=4), WORDS)
    batch = rows_of([told, TOLD], WORDS, picker=picker, room=room).collate(np.array([0, -1, 1]), 20, None)
    one = batch.concepts
    assert one.ids.shape == (3, 4)
    assert not one.mask[1:].any()
    row = zip(one.ids[0], one.place[0], one.mask[0], strict=True)
    assert [(picker.words[word], picker.words[batch.source[0, place]]) for word, place, real in row if real] == expected
    assert (one.intensity[0] > 0).tolist() == one.mask[0].tolist()
    lexicon = vader_lexicon()
    intensities = [abs(lexicon.get(picker.words[i], 0.0)) / 4 for i in batch.source[0]]
    np.testing.assert_allclose(batch.intensity[0], intensities, rtol=1e-6)
    assert rows_of([told], WORDS).collate(np.array([0]), 20, None).intensity is None


def test_the_control_leaves_as_many_concepts_and_facts_of_the_same_clauses():
    """Words and clauses have another dialogue's concepts and facts in place of their own."""
    facts = [
        [Fact("dog", "IsA", "domestic animal"), Fact("i miss my dog.", "xReact", "sad")],
        [Fact("cat", "IsA", "friend"), Fact("oh no!", "xReact", "happy")],
    ]
    asked = [Instance("a#2", ("My dog ran. I miss my dog.",), "", ""), Instance("b#2", ("My cat! Oh no!",), "", "")]
    picker = ConceptPicker.of(ConceptsSettings(most=4), WORDS)

    def read(rows):
        given = zip(asked, rows, strict=True)
        told = [dataclasses.replace(i, notes={"facts": [fact.row() for fact in own]}) for i, own in given]
        batch = rows_of(told, WORDS, readers=("alignment",), picker=picker).collate(np.array([0, 1]), 12, None)
        found = zip(batch.concepts.ids, batch.concepts.mask, strict=True)
        words = [[picker.words[i] for i in ids[mask]] for ids, mask in found]
        return batch, words, [[WORDS.decode(list(map(int, ids))) for ids in row] for row in batch.cognition.feelings]

    (real, words, feelings), (control, others, felt) = read(facts), read(exchanged(asked, facts))
    assert (words, others) == ([["animal", "animal"], ["friend"]], [["friend", "friend"], ["animal"]])
    np.testing.assert_array_equal(control.concepts.place, real.concepts.place)
    assert (feelings[0][:3], feelings[1][:3]) == (["", "", "sad"], ["", "", "happy"])
    assert felt == feelings[::-1]


@pytest.mark.real_data
def test_kemps_own_concepts_are_found_at_their_words(real_data):
    """Those that it released for the test split, one a word; a word that comes twice takes two of the ten places."""
    path = real_data / "knowledge" / "kemp_test_concepts.json.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    rows = json.loads(gzip.decompress(path.read_bytes()))
    told = [concept for row in rows for concepts in row["concepts"].values() for concept in concepts]
    words = train_words([*told, *(turn for row in rows for turn in row["context"])], min_count=1)
    picker = ConceptPicker.of(ConceptsSettings(), words)
    heads = found = concepts = intense = 0
    for row in rows:
        facts = [Fact(head, "RelatedTo", one) for head, several in row["concepts"].items() for one in several]
        source = [words.cls_id, *(i for turn in row["context"] for i in words.encode(turn))]
        picked = picker(source, facts)
        heads += min(len(row["concepts"]), 10)
        found += len({picker.words[source[place]] for _, place in picked})
        concepts += len(picked)
        intense += sum(picker.intensities[i] > 0 for i, _ in picked)
    assert found / heads > 0.95
    assert intense / concepts == pytest.approx(0.617, abs=0.002)  # VADER knows these
