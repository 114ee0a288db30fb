"""Sources that embed or write: the nearest event, a COMET, a prompted model."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.types import Instance
from empax.data.knowledge import Fact
from empax.data.wordnet import WordNet
from empax.parts.knowledge import quality
from empax.parts.knowledge.generated import Comet, Prompted, Writer, parse, question
from empax.parts.knowledge.settings import SourceSettings
from empax.parts.knowledge.sources import Files, NearestEvent, OfClauses, check_source
from tests.data import small_wordnet

EVENTS = {
    "PersonX loses PersonX's dog": [Fact("PersonX loses PersonX's dog", "xReact", "sad"),
                                    Fact("PersonX loses PersonX's dog", "xReact", "hurt", 1)],
    "PersonX wins the game": [Fact("PersonX wins the game", "xReact", "happy")],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Letters:
    """Texts by the words that they have in common."""

    words: tuple = ("dog", "game", "lose", "win")
    hash: str = "letters"

    def __call__(self, texts, *, progress=None):
        counts = np.array([[word in text.lower() for word in self.words] for text in texts], float) + 1e-3
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def test_facts_are_those_of_the_nearest_event_with_its_cosine():
    source = NearestEvent(EVENTS, Letters(), tails=1)
    rows = [
        Instance("a#2", ("Hi.", "Hello.", "My dog is gone"), "", ""),
        Instance("b#2", ("We won the game!",), "", ""),
    ]
    (first, dropped), (second, _) = source.find(rows, "test")
    assert [(fact.relation, fact.tail, fact.rank) for fact in first] == [("xReact", "sad", 0)]
    assert dropped == 0
    assert second[0].tail == "happy"
    expected = Letters()(["My dog is gone"])[0] @ Letters()(["I loses my dog"])[0]
    assert first[0].score == pytest.approx(expected)
    thanked = {"PersonX wins": [Fact("PersonX wins", "xEffect", tail) for tail in ("PersonX cries", "cries", "none")]}
    ((told, _),) = NearestEvent(thanked, Letters(), tails=2).find(rows[1:], "test")
    assert [(fact.head, fact.tail) for fact in told] == [("PersonX wins", "cries")]  # once
    assert dataclasses.replace(source, tails=2).hash != source.hash
    assert len(dataclasses.replace(source, tails=2).find(rows, "test")[0][0]) == 2


def test_a_file_ranks_its_facts_but_void_and_repeated_ones_are_left_out(tmp_path):
    kept = Fact("I lost", "xReact", "sad", rank=2), Fact("I lost", "xWant", "a key", rank=0)
    facts = [Fact("I lost", "xNeed", "none"), kept[0], dataclasses.replace(kept[0], tail="Sad ", rank=3), kept[1]]
    row = {"id": "a#2", "source": "us", "facts": [fact.row() for fact in facts]}
    (path := tmp_path / "facts.jsonl").write_text(json.dumps(row))
    source = Files(SourceSettings("file", str(path)))
    assert source.find([Instance("a#2", ("I lost",), "", "")], "train") == [(list(kept), 0)]


def test_sentences_of_a_turn_are_asked_of_too_and_head_their_facts():
    source = OfClauses(NearestEvent(EVENTS, Letters(), tails=1))
    rows = [Instance("a#2", ("Hi.", "Yes?", "We win. My dog is gone! I hate to lose a dog"), "", ""),
            Instance("b#2", ("We won the game!",), "", "")]  # fmt: skip
    (first, _), (second, _) = source.find(rows, "test")
    assert [(fact.head, fact.tail) for fact in first] == [
        ("PersonX loses PersonX's dog", "sad"), ("We win.", "happy"), ("My dog is gone!", "sad"),
        ("I hate to lose a dog", "sad"),
    ]  # fmt: skip
    assert second == source.source.find(rows, "test")[1][0]  # a single sentence is the turn
    twice = Instance("c#2", ("We win! We win!",), "", "")
    assert [fact.head for fact in source.find([twice], "test")[0][0]] == ["PersonX wins the game", "We win!"]
    assert source.hash != source.source.hash
    assert source.name == "ATOMIC, nearest event, by clause"
    lossy = SimpleNamespace(find=lambda rows, split: [([], 1) for _ in rows])
    assert OfClauses(lossy).find(rows, "test") == [([], 4), ([], 1)]  # of the turn and its three sentences


@dataclasses.dataclass
class Says:
    """In place of a Writer: what it is asked, it says."""

    answers: dict
    tokenizer: object
    asked: list = dataclasses.field(default_factory=list)
    hash: str = "says"

    def __call__(self, sources, *, progress=None):
        texts = [self.tokenizer.decode(ids) for ids in sources]
        self.asked += texts
        return [[(tail, -float(k)) for k, tail in enumerate(self.answers.get(text, ["none"]))] for text in texts]


class Plain:
    """A tokenizer of characters."""

    framing = ((), ())
    start_id = 0

    def encode_batch(self, texts):
        return [[ord(c) for c in text] for text in texts]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_comet_is_asked_of_the_last_turn_and_of_each_thing_in_its_context(tmp_path):
    wordnet = WordNet(small_wordnet.write(tmp_path / "wordnet"))
    told = {"I lost it. xReact [GEN]": ["sad", "none", "Sad"],
            "A dog? I lost it., in this case, dog ObjectUse [GEN]": ["company"]}  # fmt: skip
    writer = Says(told, Plain())
    source = Comet(writer, "COMET x", ("xReact", "ObjectUse"), 5, wordnet)
    rows = [Instance("a#2", ("A dog?", "I lost it."), "gold", "")] * 2
    (facts, _), (again, _) = source.find(rows, "test")
    assert [(f.head, f.relation, f.tail, f.score) for f in facts] == [
        ("I lost it.", "xReact", "sad", 0.0), ("dog", "ObjectUse", "company", 0.0),
    ]  # fmt: skip
    assert again == facts
    assert sorted(writer.asked) == sorted(told)  # each once
    people = dataclasses.replace(source, wordnet=None, relations=("xReact",))
    assert [f.relation for f in people.find(rows, "test")[0][0]] == ["xReact"]
    assert people.hash != source.hash


def test_tails_of_a_comet_are_in_the_first_person():
    """It writes as ATOMIC does; a sentence of such a tail would be "As a result, I PersonX cries."."""
    told = ["PersonX cries", "cries", "calls PersonY's mother"]
    writer = Says({"I lost it. xEffect [GEN]": told}, Plain())
    source = Comet(writer, "COMET x", ("xEffect",), 5, None)
    ((facts, _),) = source.find([Instance("a#2", ("I lost it.",), "", "")], "test")
    assert [(f.tail, f.rank) for f in facts] == [("cries", 0), ("calls their mother", 1)]


def test_of_a_context_without_things_nothing_is_asked(tmp_path):
    tokenizer = Plain()
    tokenizer.eos_id = tokenizer.pad_id = 0
    writer = Writer(None, None, tokenizer, None, 4)
    source = Comet(writer, "COMET x", ("ObjectUse",), 5, WordNet(small_wordnet.write(tmp_path / "wordnet")))
    assert source.find([Instance("chat#1", ("Hi.",), "", "")], "") == [([], 0)]


def test_what_a_prompted_model_writes_is_parsed_strictly():
    written = " sad\nNeeded: to have a dog\nWanted: nothing\nThen: looks for it\nWants: a: b\n\nI won!\nFeels: glad"
    facts, dropped = parse("I lost it", written)
    assert [(f.relation, f.tail) for f in facts] == [
        ("xReact", "sad"), ("xNeed", "to have a dog"), ("xEffect", "looks for it"),
    ]  # fmt: skip
    assert dropped == 2
    assert parse("I lost it", "") == ([], 5)
    assert [parse("I lost it", " " + "very " * more + "sad")[1] for more in (11, 12)] == [4, 5]
    assert parse("x", f" sad\n{question('y')}")[1] == 4


def test_a_prompted_model_is_shown_the_last_turn_on_one_line():
    writer = Says({"I lost it. Oh no.\nFeels:": [" sad\nNeeded: a dog"]}, Plain())
    source = Prompted(writer, "m")
    (facts, dropped) = source.find([Instance("a#2", ("Hi.", "x", "I lost it.\n Oh no."), "", "")], "")[0]
    assert [(f.relation, f.tail) for f in facts] == [("xReact", "sad"), ("xNeed", "a dog")]
    assert dropped == 3


def test_quality_scores_the_first_answer_against_all_that_people_said():
    asked = quality.questions(EVENTS)
    assert [(q.relation, q.tails) for q in asked] == [("xReact", ("sad", "hurt")), ("xReact", ("happy",))]
    assert quality.scores(asked, ["Hurt", "angry"])["exact_match"] == 50.0
    assert quality.scores(asked, ["", ""])["exact_match"] == 0.0
    long = [quality.Question("e", "xWant", ("to go home now", "to sleep"))]
    assert quality.scores(long, ["to go home now"])["bleu_2"] == pytest.approx(100.0)
    half = quality.scores(long, ["to go there now"])["bleu_2"]  # the root of 3 / 4 words and 1 / 3 pairs
    assert half == pytest.approx(50.0)
    others = [("PersonX loses the dog", "xReact"), ("PersonX wins", "xWant")]
    nearest = [quality.Question(*other, ("x",)) for other in others]
    assert quality.ask_nearest(EVENTS, Letters(), nearest) == ["sad", ""]


def test_comet_needs_to_know_what_a_thing_is():
    run = SimpleNamespace(stage="knowledge", may_fetch=False)
    with pytest.raises(ConfigError, match=r"nothing finds the entities of a context; set entities"):
        check_source(SourceSettings("comet", "nowhere"), run, social=False)
    with pytest.raises(DataError, match="nowhere"):
        check_source(SourceSettings("comet", "nowhere", entities="nowhere"), run, social=False)


@pytest.mark.parametrize("folder", ["runs/comet/export", "/nowhere", "./comet", "~/comet"])
def test_a_plan_takes_no_folder_that_does_not_exist_for_a_name_on_the_hub(folder):
    run = SimpleNamespace(stage="knowledge", planned=True)
    with pytest.raises(ConfigError, match=rf"config\.knowledge: there is no folder '{folder}', .* USER/NAME or NAME"):
        check_source(SourceSettings("comet", folder), run, social=True)
    check_source(SourceSettings("comet", "user/comet"), run, social=True)  # the run will ask the hub


@pytest.mark.slow
def test_a_random_bart_is_a_comet_of_any_words(bart_folder):
    settings = SourceSettings("comet", str(bart_folder), tails=3, batch_size=4)
    source = Comet.of(settings, ("xReact", "xWant"))
    assert isinstance(source.writer, Writer)
    rows = [Instance(f"{n}#2", (f"I lost my {word}.",), "", "") for n, word in enumerate(("dog", "cat", "dog"))]
    found = source.find(rows, "test")
    assert [len(facts) <= 6 for facts, _ in found] == [True] * 3
    assert found[0] == found[2]
    assert source.find(rows, "test") == found
    assert all(fact.score <= 0 for facts, _ in found for fact in facts)
    json.dumps([fact.row() for facts, _ in found for fact in facts])
