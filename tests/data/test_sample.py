"""The built-in corpus is what its description says."""

from collections import Counter

from empax.core.types import EMOTIONS, LEVELS, MECHANISMS
from empax.data import sample
from empax.data.dialogues import to_instances

INTENTS = {
    "acknowledging", "agreeing", "consoling", "encouraging", "neutral", "questioning", "suggesting", "sympathizing",
    "wishing",
}  # fmt: skip


def everything():
    return [dialogue for dialogues in sample.load_dialogues().values() for dialogue in dialogues]


def test_ten_dialogues_for_each_emotion_two_to_six_turns_that_alternate():
    dialogues = everything()
    assert len(dialogues) == 320
    assert Counter(d.emotion for d in dialogues) == dict.fromkeys(EMOTIONS, 10)
    for dialogue in dialogues:
        speakers = [utterance.speaker for utterance in dialogue.utterances]
        assert 2 <= len(speakers) <= 6
        assert len(speakers) % 2 == 0  # every one ends with an answer
        assert speakers == ["speaker", "listener"] * (len(speakers) // 2)
    assert len({len(d.utterances) for d in dialogues}) == 3


def test_nothing_is_blank_and_no_text_stands_twice():
    dialogues = everything()
    assert len({d.id for d in dialogues}) == 320
    texts = [u.text for d in dialogues for u in d.utterances]
    assert all(text == text.strip() and text for text in texts)
    assert len({text.lower() for text in texts}) == len(texts)
    situations = [d.situation.lower() for d in dialogues]
    assert len(set(situations)) == len(situations)
    assert all(situation.strip() for situation in situations)


def test_no_template_fills_the_corpus():
    """No four words begin, or end, more than a few turns."""
    turns = [u.text.lower().split() for d in everything() for u in d.utterances]
    for ends in (Counter(" ".join(turn[:4]) for turn in turns), Counter(" ".join(turn[-4:]) for turn in turns)):
        assert ends.most_common(1)[0][1] <= 0.01 * len(turns)


def test_splits_hold_each_emotion_and_share_no_dialogue():
    splits = sample.load_dialogues()
    assert {name: len(dialogues) for name, dialogues in splits.items()} == {"train": 256, "validation": 32, "test": 32}
    for dialogues in splits.values():
        assert {d.emotion for d in dialogues} == set(EMOTIONS)
    assert {name: len(to_instances(dialogues)) for name, dialogues in splits.items()} == {
        "train": 506, "validation": 57, "test": 62,
    }  # fmt: skip


def test_every_listener_turn_has_an_intent_and_every_intent_has_turns():
    intents = sample.load_intents()
    instances = [i for dialogues in sample.load_dialogues().values() for i in to_instances(dialogues)]
    assert set(intents) == {i.id for i in instances}
    assert set(intents.values()) == INTENTS
    assert min(Counter(intents.values()).values()) >= 10


def test_every_listener_turn_has_the_level_of_each_mechanism():
    pairs = sample.load_annotated_pairs()
    instances = {i.id: i for dialogues in sample.load_dialogues().values() for i in to_instances(dialogues)}
    assert len(pairs) == len(instances)
    for mechanism in MECHANISMS:
        counts = Counter(pair.levels[mechanism] for pair in pairs)
        assert set(counts) == set(LEVELS)
        assert min(counts.values()) >= 40
    for pair in pairs:
        assert set(pair.levels) == set(MECHANISMS)
    by_text = {(i.context[-1], i.response) for i in instances.values()}
    assert {(pair.seeker_post, pair.response_post) for pair in pairs} == by_text
