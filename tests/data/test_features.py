"""Rows of ids: turn tokens, what is cut and what never is, and padding."""

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.types import ATTRIBUTES, LEVELS, Instance
from empax.data import features
from empax.data.features import (
    attribute_token,
    encode_for_bert,
    keep_newest,
    pad,
    render_contexts,
    render_exemplars,
    render_source,
    render_target,
)

SPEAKER, LISTENER, SEP, CLS, BERT_SEP = 1, 2, 3, 4, 5


class Words:
    """A tokenizer whose ids are the numbers that a text is written in; counts what it is asked."""

    pad_id = eos_id = start_id = 0
    cls_id, sep_id = CLS, BERT_SEP
    vocab_size = 1000

    def __init__(self):
        self.asked = []

    def encode(self, text):
        return [int(word) for word in text.split()]

    def encode_batch(self, texts):
        self.asked += texts
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def token_id(self, token):
        return {"<speaker>": SPEAKER, "<listener>": LISTENER, "<sep>": SEP}[token]


def test_attribute_tokens():
    assert attribute_token("sentiment", "low") == "<sentiment:low>"
    assert len(set(features.ATTRIBUTE_TOKENS)) == len(ATTRIBUTES) * len(LEVELS) == 12
    assert set(features.ATTRIBUTE_TOKENS) < set(features.SPECIAL_TOKENS)


def test_turns_alternate_back_from_the_speaker():
    context = ("10 11", "20", "30 31")
    assert render_contexts(Words(), [context, context[1:], ()], max_tokens=99) == [
        [SPEAKER, 10, 11, LISTENER, 20, SPEAKER, 30, 31], [LISTENER, 20, SPEAKER, 30, 31], [],
    ]  # fmt: skip
    answered = render_contexts(Words(), [context[:2]], max_tokens=99, last="listener")
    assert answered == [[SPEAKER, 10, 11, LISTENER, 20]]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (8, [SPEAKER, 10, 11, LISTENER, 20, SPEAKER, 30, 31]),
        (7, [SPEAKER, 11, LISTENER, 20, SPEAKER, 30, 31]),
        (6, [LISTENER, 20, SPEAKER, 30, 31]),  # a turn of its token alone says nothing
        (5, [LISTENER, 20, SPEAKER, 30, 31]),
        (4, [SPEAKER, 30, 31]),
        (3, [SPEAKER, 30, 31]),
        (2, [SPEAKER, 31]),
    ],
)
def test_oldest_ids_go_first_and_a_cut_turn_keeps_its_token(max_tokens, expected):
    assert render_contexts(Words(), [("10 11", "20", "30 31")], max_tokens=max_tokens) == [expected]


def test_shared_turns_are_tokenised_once():
    tokenizer = Words()
    contexts = [("10",), ("10", "20", "30"), ("10", "20", "30", "40", "50")]
    rows = render_contexts(tokenizer, contexts, max_tokens=99)
    assert sorted(tokenizer.asked) == ["10", "20", "30", "40", "50"]
    assert rows == [render_contexts(Words(), [context], max_tokens=99)[0] for context in contexts]


def test_exemplars_end_with_the_listener():
    instance = Instance("a#2", ("10",), "20 21", "sad")
    assert render_exemplars(Words(), [instance], max_tokens=99) == [[SPEAKER, 10, LISTENER, 20, 21]]
    assert render_exemplars(Words(), [instance], max_tokens=3) == [[LISTENER, 20, 21]]


def test_keep_newest_without_turns_is_a_plain_cut():
    assert keep_newest([7, 8, 9], 2) == [8, 9]
    assert keep_newest([7, 8, 9], 1) == [9]
    assert keep_newest([7, 8, 9], 0) == []


def source(context, passage, max_tokens, **kwargs):
    return render_source([50, 51], context, [60, 61], passage, sep_id=SEP, max_tokens=max_tokens, **kwargs)


def test_source_layout():
    assert source([10, 11], [20], 99) == [50, 51, 10, 11, SEP, 60, 61, 20]
    assert render_source([50], [10], sep_id=SEP, max_tokens=99) == [50, 10]
    assert render_source([], [10], [], [20], sep_id=SEP, max_tokens=99) == [10, SEP, 20]


def test_passage_gives_way_first_then_the_context():
    context, passage = list(range(100, 110)), list(range(200, 210))
    # 15 tokens of text: the context stays whole, the passage has the rest, not less than half.
    assert source(context, passage, 20) == [50, 51, *context[2:], SEP, 60, 61, *passage[:7]]
    assert source(context[:4], passage, 15) == [50, 51, *context[:4], SEP, 60, 61, *passage[:6]]
    assert source(context, passage[:3], 15) == [50, 51, *context[3:], SEP, 60, 61, *passage[:3]]


@pytest.mark.parametrize("max_tokens", range(9, 40))
@pytest.mark.parametrize(("num_context", "num_passage"), [(1, 30), (30, 1), (12, 12), (3, 3)])
def test_source_always_fits_and_never_loses_attributes(max_tokens, num_context, num_passage):
    context, passage = [SPEAKER, *range(100, 99 + num_context)], list(range(200, 200 + num_passage))
    row = source(context, passage, max_tokens, turn_ids=(SPEAKER, LISTENER))
    assert len(row) == min(max_tokens, 5 + num_context + num_passage)
    assert row[:3] == [50, 51, SPEAKER]
    assert row[row.index(SEP) + 1 :][:2] == [60, 61]
    assert row[row.index(SEP) - 1] == context[-1]  # the newest stays
    assert row[row.index(SEP) + 3] == passage[0]


def test_source_without_room_is_refused():
    with pytest.raises(ConfigError, match="max_tokens = 8 leaves 3 tokens beside 5 attribute tokens and separators"):
        source([10], [20], 8)
    assert render_source([50], [10, 11, 12], sep_id=SEP, max_tokens=3) == [50, 11, 12]
    with pytest.raises(ConfigError, match="max_tokens = 2 leaves 1 tokens beside 1"):
        render_source([50], [10], sep_id=SEP, max_tokens=2)


def test_a_whole_target_ends_and_a_truncated_one_does_not():
    assert render_target([7, 8], 1, 9) == render_target([7, 8], 1, 3) == [7, 8, 1]
    assert render_target([7, 8, 9], 1, 3) == [7, 8, 9]
    assert render_target([7, 8, 9], 1, 2) == [7, 8]
    assert render_target([], 1, 1) == [1]


def test_bert_frame():
    tokenizer = Words()
    assert encode_for_bert(tokenizer, ["10 11 12", "20", "20"], 4) == [
        [CLS, 11, 12, BERT_SEP],
        [CLS, 20, BERT_SEP],
        [CLS, 20, BERT_SEP],
    ]
    assert tokenizer.asked == ["10 11 12", "20"]
    assert encode_for_bert(tokenizer, ["10 11 12"], 4, keep="left") == [[CLS, 10, 11, BERT_SEP]]
    assert encode_for_bert(tokenizer, ["10 11 12"], 5) == [[CLS, 10, 11, 12, BERT_SEP]]
    ends = encode_for_bert(tokenizer, ["10 11 12 13 14", "20 21 22"], 5, keep="ends")
    assert ends == [[CLS, 10, 11, 14, BERT_SEP], [CLS, 20, 21, 22, BERT_SEP]]
    assert encode_for_bert(tokenizer, ["10 11"], 3) == [[CLS, 11, BERT_SEP]]
    assert encode_for_bert(tokenizer, ["10 11"], 4, prompt="7 ") == [[CLS, 7, 11, BERT_SEP]]
    with pytest.raises(ConfigError, match="max_tokens = 3 leaves no room after a prompt of 1 tokens"):
        encode_for_bert(tokenizer, ["10"], 3, prompt="7 ")


def test_pad():
    ids, mask = pad([[7, 8], [], [9, 9, 9]], 4, -5)
    np.testing.assert_array_equal(ids, [[7, 8, -5, -5], [-5, -5, -5, -5], [9, 9, 9, -5]])
    np.testing.assert_array_equal(mask, [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
    assert pad([], 3, 0)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="row 1 has 3 ids, more than the padded length 2"):
        pad([[1], [1, 2, 3]], 2, 0)
