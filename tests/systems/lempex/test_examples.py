"""How LEMPEx' texts become batches: who speaks, which exemplars are shown, what judges read."""

import numpy as np
import pytest
import tokenizers as rust
from tokenizers import models, pre_tokenizers, processors

from empax.core.types import MECHANISMS, Instance
from empax.data.exemplars import Corpus
from empax.data.sources import LayoutSettings
from empax.data.tokenizers import SubwordTokenizer
from empax.evaluation.empathy import sentiment
from empax.systems.lempex.examples import LISTENER, NOBODY, SPEAKER, LempexExamples, TurnForm

WORDS = ["[PAD]", "[CLS]", "[SEP]", *"abcdefgh", "great", "terrible"]


@pytest.fixture(scope="module")
def tokenizer():
    backend = rust.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return SubwordTokenizer(backend, pad="[PAD]", eos="[SEP]", start="[CLS]")


def form(tokenizer, context=10, passage=5, target=6):
    return TurnForm(
        tokenizer, LayoutSettings(max_context_tokens=context, max_passage_tokens=passage, max_target_tokens=target)
    )


def words(ids):
    return " ".join(WORDS[i] for i in ids)


LEVELS = {"emotional_reaction": "high", "interpretation": "low", "exploration": "mid", "sentiment": "low"}
INSTANCES = [
    Instance("x#2", ("a b",), "great c", "proud", {"response_attributes": LEVELS}),
    Instance("y#4", ("d", "e f", "g"), "h", "sad", {"response_attributes": LEVELS}),
    Instance("z#2", ("h",), "terrible d e f g h a", ""),
]


def test_every_token_knows_its_speaker_and_the_newest_stay(tokenizer):
    (one, who), (three, turns) = form(tokenizer).spoken(INSTANCES[:2])
    assert (words(one), who) == ("[CLS] a b [SEP]", [NOBODY, SPEAKER, SPEAKER, NOBODY])
    assert words(three) == "[CLS] d e f g [SEP]"
    assert turns == [NOBODY, SPEAKER, LISTENER, LISTENER, SPEAKER, NOBODY]
    ((cut, left),) = form(tokenizer, context=5).spoken(INSTANCES[1:2])
    assert (words(cut), left) == ("[CLS] e f g [SEP]", [NOBODY, LISTENER, LISTENER, SPEAKER, NOBODY])
    assert [words(text.ids) for text in form(tokenizer).passages(INSTANCES)] == [
        "[CLS] great c [SEP]", "[CLS] h [SEP]", "[CLS] terrible d e [SEP]",
    ]  # fmt: skip


def test_a_batch_shows_the_candidates_and_those_of_another_context(tokenizer):
    corpus = Corpus.of(INSTANCES, form(tokenizer))
    candidates = np.array([[1, 2], [0, -1], [1, 0]])
    examples = LempexExamples(INSTANCES, form(tokenizer), corpus=corpus, candidates=candidates, others=True)
    batch = examples.collate(np.array([1, 0, -1]), 8, np.random.default_rng(0))
    shown = [
        [words(ids[mask]) for ids, mask in zip(*row, strict=True)]
        for row in zip(batch.exemplar, batch.exemplar_mask, strict=True)
    ]
    assert shown == [
        ["[CLS] great c [SEP]", ""], ["[CLS] h [SEP]", "[CLS] terrible d e [SEP]"], ["", ""],
    ]  # fmt: skip
    others = [
        [words(ids[mask]) for ids, mask in zip(*row, strict=True)]
        for row in zip(batch.other, batch.other_mask, strict=True)
    ]
    assert others[0] == ["[CLS] h [SEP]", "[CLS] great c [SEP]"]  # those of the third
    assert others[1] == shown[0]
    assert batch.speaker.shape == batch.source.shape
    np.testing.assert_array_equal(batch.speaker[2], NOBODY)
    assert batch.levels is None
    alone = LempexExamples(INSTANCES, form(tokenizer)).collate(np.array([1]), 3, np.random.default_rng(0))
    assert (alone.exemplar, alone.other) == (None, None)
    assert (words(alone.source[0]), alone.speaker[0].tolist()) == ("f g [SEP]", [LISTENER, SPEAKER, NOBODY])


def test_judges_read_what_source_and_target_hold(tokenizer):
    examples = LempexExamples(INSTANCES, form(tokenizer), judged=20)
    batch = examples.collate(np.array([0, 1, 2, -1]), 6, np.random.default_rng(0))
    rows = [words(ids[mask]) for ids, mask in zip(batch.judged, batch.judged_mask, strict=True)]
    assert rows == [
        "[CLS] a b [SEP] great c [SEP]", "[CLS] d e f g [SEP] h [SEP]", "[CLS] h [SEP] terrible d e f g [SEP]", "",
    ]  # fmt: skip
    for i, row in enumerate(rows[:3]):
        target = batch.target[i][batch.target_mask[i]][:-1]
        start = batch.judged_start[i]
        np.testing.assert_array_equal(batch.judged[i, start : start + len(target)], target)
        assert row.split()[start - 1] == "[SEP]"
    replies = [words(ids[mask]) for ids, mask in zip(batch.reply, batch.reply_mask, strict=True)]
    assert replies == ["[CLS] great c [SEP]", "[CLS] h [SEP]", "[CLS] terrible d e f g [SEP]", ""]
    assert MECHANISMS == ("emotional_reaction", "interpretation", "exploration")
    np.testing.assert_array_equal(batch.levels[:3], [[2, 0, 1], [2, 0, 1], [-1, -1, -1]])
    np.testing.assert_allclose(batch.compound[:3], [sentiment(i.response) for i in INSTANCES], rtol=1e-6)
    assert batch.compound[0] > 0.5
    short = LempexExamples(INSTANCES, form(tokenizer), judged=8)
    cut = short.collate(np.array([1]), 6, np.random.default_rng(0))
    assert words(cut.judged[0][cut.judged_mask[0]]) == "[CLS] d e f g [SEP] h [SEP]"
    assert cut.judged.shape == (1, 8)
