"""Spans: where reasons are, which tokens they are, and where tokens of one tokenizer are in another."""

import json

import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError, write_jsonl
from empax.core.inputs import noting
from empax.core.types import Instance
from empax.data import spans
from empax.data.bpe import train_bpe
from empax.data.features import SPECIAL_TOKENS, render_contexts
from empax.data.spans import PlacedRow, Span, SpanExample, place_contexts
from empax.data.tokenizer_folders import load_tokenizer

CONTEXT = ("My dog died.", "Oh no!", "I miss him terribly.")
INSTANCE = Instance("a#4", CONTEXT, "Of course.", "sad")


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "train.jsonl"
    example = SpanExample("a#4", CONTEXT, (Span(0, 3, 11), Span(2, 2, 6)))
    write_jsonl(path, ({"id": "a#4", **span._asdict()} for span in example.spans))
    assert spans.read_spans(path, [INSTANCE, Instance("b#2", ("x",), "y", "")]) == [example]
    write_jsonl(path, [{"id": "c#2", "turn": 0, "start": 0, "end": 1}, {"id": "a#4", "turn": 0, "start": 3, "end": 11}])
    # Of a limited run: the corpus has more instances.
    assert spans.read_spans(path, [INSTANCE], some=True) == [SpanExample("a#4", CONTEXT, (Span(0, 3, 11),))]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "b#2", "turn": 0, "start": 0, "end": 1}, "no instance 'b#2'"),
        ({"id": "a#4", "start": 0, "end": 1}, "found id, start, end"),
        ({"id": "a#4", "turn": 0, "start": 0.5, "end": 1}, "whole numbers"),
        ({"id": "a#4", "turn": 1, "start": 0, "end": 2}, "turn 1 is the listener's"),
        *(
            ({"id": "a#4", "turn": turn, "start": start, "end": end}, "not within a context of 3 turns")
            for turn, start, end in ((0, 3, 13), (0, -1, 2), (0, 2, 2), (-1, 0, 1), (3, 0, 1))
        ),
    ],
)
def test_a_broken_file_is_refused(row, said, tmp_path):
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"row 1: .*{said}"):
        spans.read_spans(path, [INSTANCE])


def test_lexicon_spans_are_strong_words_of_the_speaker():
    found = spans.lexicon_spans(("A horrible, nice day", "terrible!", "I love it, good"))
    texts = [("A horrible, nice day", "", "I love it, good")[s.turn][s.start : s.end] for s in found]
    assert texts == ["horrible", "nice", "love", "good"]
    assert spans.lexicon_spans(("A nice day",), least_valence=3.0) == ()


def test_the_sample_has_causes_of_64_turns():
    train, test = spans.sample_examples("train"), spans.sample_examples("test")
    assert (len(train), len(test), len(spans.sample_examples("validation"))) == (32, 32, 0)
    for example in (*train, *test):
        assert example.spans
        assert all(0 <= s.start < s.end <= len(example.context[s.turn]) for s in example.spans)
    by_id = {example.id: example for example in train}
    found = by_id["sample-furious-01#2"]
    (span,) = found.spans
    assert found.context[0][span.start : span.end] == "the neighbour had chopped my entire hedge down to the ground"


@pytest.fixture(scope="module")
def tokenizer():
    texts = [" ".join(CONTEXT), "The dog was mine. I miss my dog terribly."]
    return train_bpe(texts, vocab_size=300, lowercase=True, special_tokens=SPECIAL_TOKENS)


def placed(tokenizer, **options):
    (row,) = place_contexts(tokenizer, [CONTEXT], **{"max_tokens": 99, "first": tokenizer.cls_id, **options})
    return row


def test_ids_know_their_characters(tokenizer):
    row = placed(tokenizer, behind=tokenizer.sep_id)
    assert row.ids[0] == tokenizer.cls_id
    assert row.ids.count(tokenizer.sep_id) == 3
    for turn, text in enumerate(CONTEXT):
        own = [(i, p) for i, p in zip(row.ids, row.places, strict=True) if p.turn == turn]
        assert [i for i, _ in own] == tokenizer.encode(text)
        assert {c for _, p in own for c in range(p.start, p.end)} >= {i for i, c in enumerate(text) if c != " "}
    labels = row.labels([Span(2, 2, 10)])  # "miss him"
    marked = [CONTEXT[p.turn][p.start : p.end].strip() for p, label in zip(row.places, labels, strict=True) if label]
    assert "".join(marked) == "misshim"
    (span,) = row.spans(labels)
    assert CONTEXT[span.turn][span.start : span.end].strip() == "miss him"
    told = row.told(3)
    assert {p.turn for p, t in zip(row.places, told, strict=True) if t} == {0, 2}


def test_the_oldest_ids_are_cut_and_the_first_and_the_speaker_stay(tokenizer):
    roles = tuple(map(tokenizer.token_id, ("<speaker>", "<listener>")))
    whole = placed(tokenizer, roles=roles)
    assert [i for i, p in zip(whole.ids, whole.places, strict=True) if i in roles] == [roles[0], roles[1], roles[0]]
    for size in range(3, len(whole.ids) + 1):
        cut = placed(tokenizer, roles=roles, max_tokens=size)
        assert (cut.ids[0], [cut.ids[1:]]) == (whole.ids[0], render_contexts(tokenizer, [CONTEXT], max_tokens=size - 1))
        assert cut.places[:2] == [Span(-1, 0, 0)] * 2
        assert cut.places[2:] == whole.places[2 - len(cut.ids) :]
    pieces, cut = placed(tokenizer), placed(tokenizer, max_tokens=6)
    assert cut.ids == [pieces.ids[0], *pieces.ids[-5:]]
    assert placed(tokenizer, max_tokens=2).ids == [pieces.ids[0], pieces.ids[-1]]
    with pytest.raises(ConfigError, match="max_tokens = 1"):
        placed(tokenizer, max_tokens=1)


def test_ids_of_one_row_find_theirs_in_another(tokenizer):
    """Also where a row was cut, or has no such text."""
    words = PlacedRow([1, 2, 3, 4], [Span(-1, 0, 0), Span(0, 0, 2), Span(0, 3, 6), Span(2, 0, 1)])
    pieces = PlacedRow([7, 8, 9], [Span(-1, 0, 0), Span(0, 3, 4), Span(0, 4, 6)])
    np.testing.assert_array_equal(words.aligned_with(pieces), [-1, -1, 1, -1])
    row = placed(tokenizer)
    found = row.aligned_with(row)
    assert found[0] == -1
    for place, number in zip(row.places[1:], found[1:], strict=True):
        other = row.places[number]  # not always itself: two ids may share a character
        assert (other.turn, other.start) == (place.turn, place.start)


def test_neighbours_are_one_span_and_turns_are_apart():
    places = [Span(-1, 0, 0), Span(0, 0, 2), Span(0, 2, 6), Span(0, 7, 9), Span(1, 0, 3), Span(1, 4, 8)]
    row = PlacedRow([1] * 6, places)
    assert row.spans([1, 1, 1, 0, 1, 0]) == (Span(0, 0, 6), Span(1, 0, 3))
    assert row.spans([0, 0, 0, 1, 1, 1]) == (Span(0, 7, 9), Span(1, 0, 8))
    assert spans.marked(CONTEXT, [Span(0, 3, 11), Span(0, 0, 2)])[0] == "<em>My</em> <em>dog died</em>."


def test_f1_of_tokens_and_of_whole_spans():
    tokens, whole = spans.span_counts([[0, 1, 1, 0, 1]], [[1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(tokens, [2, 3, 3])
    np.testing.assert_array_equal(whole, [1, 2, 2])
    assert spans.f1(tokens) == pytest.approx(200 / 3)
    assert spans.f1([0, 0, 0]) == 0


def reccon(turns):
    return {"d": [[{"turn": i + 1, "speaker": "AB"[i % 2], "utterance": text, "emotion": emotion, **more}
                   for i, (text, emotion, more) in enumerate(turns)]]}  # fmt: skip


def test_reccon_gives_causes_in_the_turns_of_who_feels(tmp_path):
    def causes(evidence, texts):
        return {"expanded emotion cause evidence": evidence, "expanded emotion cause span": texts}

    path = tmp_path / "reccon.json"
    path.write_text(json.dumps(reccon([
        ("I won , really !", "neutral", {}),
        ("Great !", "happiness", causes([1], ["I won"])),
        ("I ' m so happy .", "happiness", causes([1, 3, "b", 2], ["I won", "I ' m so happy", "b", "Great"])),
    ])))  # fmt: skip
    first, second = spans.read_reccon(path)
    assert (first.id, first.context, first.spans) == ("d#2", ("I won, really!", "Great!"), ())
    assert second.context[2] == "I'm so happy."
    assert second.spans == (Span(0, 0, 5), Span(2, 0, 12))
    path.write_text('{"d": [[{"turn": 1}]]}')
    with pytest.raises(DataError, match="not a RECCON file"):
        spans.read_reccon(path)


def test_a_file_names_the_turns_of_causes(tmp_path):
    path = tmp_path / "causes.jsonl"
    write_jsonl(path, [{"conv_id": "a", "emotion_cause": [0, 2]}, {"conv_id": "b", "emotion_cause": []}])
    assert spans.read_cause_turns(path) == {"a": (0, 2), "b": ()}
    for wrong in ({"conv_id": 1, "emotion_cause": []}, {"conv_id": "a"}, {"conv_id": "a", "emotion_cause": ["0"]}):
        write_jsonl(path, [wrong])
        with pytest.raises(DataError, match="row 1: it must have conv_id and emotion_cause, a list of turns"):
            spans.read_cause_turns(path)


@pytest.mark.real_data
def test_the_real_causes(real_data):
    folder = spans.find_causes(real_data)
    counts = {}
    for split, name in spans.RECCON_SPLITS.items():
        examples = spans.read_reccon(folder / f"reccon_dailydialog_{name}.json")
        counts[split] = len(examples), sum(len(example.spans) for example in examples)
    # Of 7,630, 352 and 1,933 causes those in turns of whoever feels the emotion.
    assert counts == {"train": (4562, 4251), "validation": (200, 195), "test": (1099, 1113)}
    turns = spans.read_cause_turns(folder / "empathetic_dialogues_test_causes.jsonl")
    assert len(turns) == 2546


@pytest.mark.real_data
def test_pieces_of_minilm_know_their_characters():
    tokenizer = load_tokenizer("minilm")
    (row,) = place_contexts(tokenizer, [("Café déjà vu — I'm unhappily here",)], max_tokens=99, first=tokenizer.cls_id)
    text = "Café déjà vu — I'm unhappily here"
    words = [text[p.start : p.end] for p in row.places if p.turn >= 0]
    assert "".join(words) == text.replace(" ", "")


def test_files_beside_other_corpora_are_read_alone(tmp_path):
    for folder in (tmp_path, tmp_path / "emotion_causes"):
        folder.mkdir(exist_ok=True)
        for name in ("reccon_dailydialog_train.json", "reccon_dailydialog_test.json", "other.json"):
            (folder / name).write_text("{}")
        with noting() as found:
            assert spans.find_causes(folder) == folder
        own = {"reccon_dailydialog_train.json", "reccon_dailydialog_test.json"}
        assert set(found["RECCON"].files) == (own if folder == tmp_path else own | {"other.json"})
