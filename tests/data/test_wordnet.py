"""Entities and what is true of them, on a WordNet of fourteen synsets; the real one where it is installed."""

from pathlib import Path

import pytest

from empax.core.files import DataError
from empax.data.wordnet import WordNet, base_forms
from tests.data import small_wordnet


@pytest.fixture
def real_wordnet(real_data_if_any):
    """The database as Debian has it, or beside the real corpora."""
    folders = [Path("/usr/share/wordnet"), *([real_data_if_any / "wordnet"] if real_data_if_any else [])]
    found = next((folder for folder in folders if (folder / "cntlist.rev").is_file()), None)
    if found is None:
        pytest.skip("no WordNet: install Debian's wordnet-base, or put its files into EMPAX_DATA_DIR/wordnet")
    return found


@pytest.fixture
def wordnet(tmp_path):
    return WordNet(small_wordnet.write(tmp_path / "wordnet"))


def told(wordnet, lemma):
    return [(fact.relation, fact.tail) for fact in wordnet.facts(lemma)]


def test_entities_are_the_words_that_are_nouns_most_often_in_their_order_and_once(wordnet):
    text = "The dogs ran, I lost my KNIFE and the children found a knife. A dog!"
    assert wordnet.entities(text) == ["dog", "knife", "child"]
    assert wordnet.entities("I run, it is alive and will run") == []  # "run" is a verb far more often
    assert wordnet.entities("") == []
    assert wordnet.entities("A haven for the dog's sum") == ["haven", "dog", "sum"]
    assert wordnet.entities("I haven't read my résumé; you haven’t either") == []


def test_inflected_forms_are_found_by_rules_and_by_lists_of_exceptions(wordnet):
    assert wordnet.lemmas("dogs", "noun") == ["dog"]
    assert wordnet.lemmas("children", "noun") == ["child"]
    assert wordnet.lemmas("running", "verb") == []  # "runn" is no word: the rules double no letter
    assert wordnet.lemmas("ran", "verb") == ["run"]


def test_common_irregular_plurals_need_no_list():
    pairs = "children child, feet foot, wives wife, potatoes potato, women woman, mice mouse"
    for plural, one in map(str.split, pairs.split(",")):
        assert one in base_forms(plural, "noun")


def test_each_relation_is_read_from_its_pointers_and_from_the_gloss(wordnet):
    assert told(wordnet, "dog") == [("IsA", "animal"), ("MadeUpOf", "tail"), ("AtLocation", "pack")]
    assert told(wordnet, "knife") == [
        ("IsA", "hand tool"), ("MadeUpOf", "steel"), ("ObjectUse", "cutting"), ("ObjectUse", "spread butter"),
    ]  # fmt: skip
    assert told(wordnet, "animal") == [("HasProperty", "alive")]
    assert told(wordnet, "tool") == [("ObjectUse", "a help")]
    assert told(wordnet, "unicorn") == []
    assert [fact.rank for fact in wordnet.facts("knife")] == [0, 0, 0, 1]


def test_folders_that_hold_no_wordnet_are_refused(wordnet, tmp_path):
    with pytest.raises(DataError, match=r"has no cntlist\.rev; name the folder"):
        WordNet(tmp_path)
    index = wordnet.folder / "index.noun"
    index.write_text(index.read_text().replace("dog n 1 3", "dog n 1 x"))
    with pytest.raises(DataError, match=r"index\.noun, line \d+: 'dog n 1 x"):
        WordNet(wordnet.folder).facts("dog")
    for line in ("dog%1:05:00:: 1", "dog%9:05:00:: 1 42", "dog%1:05:00:: 1 x"):
        (wordnet.folder / "cntlist.rev").write_text(f"{line}\n")
        with pytest.raises(DataError, match=rf"cntlist\.rev, line 1: '{line}' is not a line of a count list"):
            WordNet(wordnet.folder).entities("a dog")


def test_an_index_of_another_version_is_refused(wordnet):
    data = wordnet.folder / "data.noun"
    data.write_text("x" + data.read_text())
    with pytest.raises(DataError, match=r"data\.noun, byte \d+: no synset begins there"):
        WordNet(wordnet.folder).facts("dog")


def test_another_database_has_another_hash(wordnet):
    before = wordnet.hash
    data = wordnet.folder / "data.noun"
    data.write_text(data.read_text().replace("a pet", "a bet"))
    changed = WordNet(wordnet.folder).hash
    assert changed != before
    (wordnet.folder / "adv.exc").write_text("better well\n")
    with_exceptions = WordNet(wordnet.folder).hash
    assert with_exceptions != changed
    (wordnet.folder / "data.adj").write_text("  a licence\n")
    assert WordNet(wordnet.folder).hash != with_exceptions


@pytest.mark.real_data
def test_the_real_one_knows_dogs(real_wordnet):
    found = WordNet(real_wordnet)
    assert found.entities("I lost my dogs in the park yesterday.")[:2] == ["dog", "park"]
    assert ("IsA", "canine") in told(found, "dog")
