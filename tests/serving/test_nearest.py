"""The second reader: kernel ridge regression on examples, by an encoder whose vectors are known."""

import collections

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.serving import nearest
from empax.serving.nearest import ALARMS, RIDGE, SHARPNESS, Example, Nearest, load_nearest, read_examples, sentences


class Encoder:
    """Texts that are numbers, as points of a circle."""

    def __call__(self, texts, *, progress=None):
        angles = np.array([float(text.strip(".!? x")) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def few(self, texts, *, lengths):
        assert max(lengths) < 100
        return self(texts)


def examples(count=30):
    rng = np.random.default_rng(0)
    danger = [Example(f"{angle:.4f}x", "a", True, i % 2) for i, angle in enumerate(rng.normal(0.0, 0.5, count))]
    return danger + [Example(f"{a:.4f}x", "b", False, i % 2) for i, a in enumerate(rng.normal(2.0, 0.7, 2 * count))]


def ridge(train, asked):
    """The prediction of a kernel ridge regression, solved anew."""
    vectors, encode = Encoder()([e.text for e in train]).astype(float), Encoder()
    kernel = np.exp(SHARPNESS * (vectors @ vectors.T - 1)) + RIDGE * np.eye(len(train))
    weights = np.linalg.lstsq(kernel, np.array([1.0 if e.dangerous else -1.0 for e in train]), rcond=None)[0]
    return np.exp(SHARPNESS * (encode(asked).astype(float) @ vectors.T - 1)) @ weights


def test_scores_are_those_of_a_kernel_ridge_regression_on_the_labels():
    made = Nearest.of(Encoder(), examples())
    asked = ["0.1", "1.0", "2.5", "-3.0"]
    np.testing.assert_allclose(made.scores(Encoder()(asked)), ridge(examples(), asked), rtol=1e-5, atol=1e-6)


def test_the_threshold_lets_a_share_of_the_harmless_through_each_left_out_in_turn():
    given = examples()
    made = Nearest.of(Encoder(), given)
    left_out = [ridge(given[:i] + given[i + 1 :], [e.text])[0] for i, e in enumerate(given) if not e.dangerous]
    assert made.threshold == pytest.approx(np.quantile(left_out, 1 - ALARMS), rel=1e-4)


def test_one_dangerous_sentence_is_enough_and_many_messages_are_read_as_one_by_one():
    made = Nearest.of(Encoder(), examples())
    messages = ["0.0x", "2.0x", "2.2x", "", "…"]
    assert made.are_dangerous(messages).tolist() == [made(message) for message in messages]
    assert made.are_dangerous(messages).tolist() == [True, False, False, False, False]


def test_sentences_are_read_alone_and_together():
    assert sentences("I am fine. Are you?  Yes!") == ["I am fine. Are you? Yes!", "I am fine.", "Are you?", "Yes!"]
    assert sentences("  only  one \n") == ["only one"]
    assert sentences("I had cake\r\nit was  good\n\nbye") == [
        "I had cake it was good bye",
        "I had cake",
        "it was good",
        "bye",
    ]
    assert sentences("... !!") == []
    assert len(sentences("No. " * 50)) == nearest.MOST_SENTENCES + 1


def test_the_examples_are_hundreds_of_both_sorts_in_two_halves_none_twice():
    found = read_examples()
    counts = collections.Counter((e.dangerous, e.half) for e in found)
    assert min(counts.values()) > 300
    assert all(abs(counts[d, 0] - counts[d, 1]) < 20 for d in (True, False))
    assert len({e.text.lower() for e in found}) == len(found)
    assert len({e.kind for e in found if e.dangerous}) == 7
    assert all(size >= 60 for size in collections.Counter(e.kind for e in found).values())


def test_without_the_wheel_there_is_no_second_reader_and_the_log_says_so(monkeypatch, caplog):
    def missing():
        raise ConfigError("install it")

    monkeypatch.setitem(nearest.NAMED, "minilm", missing)
    load_nearest.cache_clear()
    with caplog.at_level("WARNING", "empax"):
        assert load_nearest() is None
    load_nearest.cache_clear()
    assert "the list of phrases alone: install it" in caplog.text


@pytest.mark.slow
def test_the_real_reader_hears_hints_and_leaves_everyday_talk_alone():
    reader = load_nearest()
    assert reader is not None
    hints = ["Nothing will matter after tonight, I have said my goodbyes.",
             "My husband gets rough and I am scared of him.",
             "Grandpa fell down and he does not answer when I shake him."]  # fmt: skip
    plain = ["We painted the kitchen yellow.", "My exam went well and I am proud.", "The bus was late again."]
    assert reader.are_dangerous([*hints, *plain]).tolist() == [True] * 3 + [False] * 3
    assert [reader(message) for message in (*hints, *plain)] == [True] * 3 + [False] * 3
