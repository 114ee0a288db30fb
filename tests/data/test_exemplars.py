"""Examples with exemplars: what stands in a source, which candidates a row gets, and that collating is pure."""

import dataclasses

import jax
import numpy as np
import pytest

from empax.core.protocols import Examples
from empax.core.types import ATTRIBUTES, EMOTIONS, Instance
from empax.data import features
from empax.data.bpe import train_bpe
from empax.data.exemplars import (
    ContextExamples,
    Corpus,
    ExemplarExamples,
    dialogue_groups,
    emotion_ids,
    encode_keys,
    encode_queries,
    pad_to_level,
)
from empax.data.sources import LayoutSettings, TaggedForm

LAYOUT = LayoutSettings(
    max_context_tokens=12, max_passage_tokens=10, max_target_tokens=6, max_query_tokens=9, max_key_tokens=11
)
LENGTH = LAYOUT.max_source_tokens
TEXT = "i feel so sad about my old dog and you are very kind to say that"
LOW = dict.fromkeys(ATTRIBUTES, "low")
HIGH = dict.fromkeys(ATTRIBUTES, "high")


def make_instances(count=30, seed=0):
    """Two instances for each dialogue, the second with the first's turns in its context."""
    rng = np.random.default_rng(seed)
    made = []
    for d in range(count // 2):
        turns = [" ".join(rng.choice(TEXT.split(), rng.integers(1, 7))) for _ in range(4)]
        emotion = EMOTIONS[d] if d != 3 else ""
        for end in (1, 3):
            notes = {"context_attributes": LOW, "response_attributes": HIGH}
            made.append(Instance(f"dialogue-{d}#{end + 1}", tuple(turns[:end]), turns[end], emotion, notes))
    return made


TOKENIZER = train_bpe([TEXT], vocab_size=400, special_tokens=features.SPECIAL_TOKENS)
INSTANCES = make_instances()


def form(layout="joined", *, attributes=True):
    return TaggedForm(TOKENIZER, LAYOUT, attributes, layout)


CORPUS = Corpus.of(INSTANCES, form(), TOKENIZER)


def exemplars(own=None, **options):
    """Candidates of instance i: the two instances of the next dialogue, then nothing."""
    corpus = Corpus.of(INSTANCES, own, TOKENIZER) if own else CORPUS
    start = (np.arange(len(INSTANCES)) // 2 * 2 + 2) % len(INSTANCES)
    candidates = np.stack([start, start + 1, np.full_like(start, -1)], axis=1)
    return ExemplarExamples(INSTANCES, corpus, candidates, own or form(), TOKENIZER, **options)


def collated(examples, *rows, length=LENGTH, seed=0):
    return examples.collate(np.array(rows), length, np.random.default_rng(seed))


def attribute_tokens(levels):
    return [TOKENIZER.token_id(features.attribute_token(name, levels[name])) for name in ATTRIBUTES]


def real(ids, mask):
    return ids[mask].tolist()


def assert_equal_batches(one, two, *, equal=True):
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)]
    assert all(same) is equal


def test_a_source_is_attributes_then_context_and_no_response():
    examples = ContextExamples(INSTANCES, form())
    assert isinstance(examples, Examples)
    batch = collated(examples, 0, 1)
    for b in range(2):
        found = real(batch.source[b], batch.source_mask[b])
        assert found[:4] == attribute_tokens(LOW)
        assert found[4:] == features.render_contexts(TOKENIZER, [INSTANCES[b].context], max_tokens=12)[0]
        target = [*TOKENIZER.encode(INSTANCES[b].response)[:5], TOKENIZER.eos_id]
        assert real(batch.target[b], batch.target_mask[b]) == target
    np.testing.assert_array_equal(batch.emotion, [0, 0])


def test_without_attributes_not_one_of_their_tokens_is_anywhere():
    every = {TOKENIZER.token_id(token) for token in features.ATTRIBUTE_TOKENS}
    bare = form(attributes=False)
    for examples in (ContextExamples(INSTANCES, bare), exemplars(bare, num_random=2)):
        assert not every & set(np.unique(collated(examples, *range(10)).source).tolist())
    # four of the context and four of the exemplar in every real source
    counts = np.isin(collated(exemplars(), *range(10)).source, list(every)).sum(axis=2)
    np.testing.assert_array_equal(counts[:, :2], 8)


def test_joined_every_passage_is_the_context_beside_one_exemplar_with_its_response():
    examples = exemplars()
    batch = collated(examples, 4, 7)
    assert batch.source.shape == (2, 3, LENGTH)
    for b, i in enumerate((4, 7)):
        own = [*attribute_tokens(LOW), *examples.contexts[i].ids, TOKENIZER.token_id(features.SEPARATOR)]
        for k, row in enumerate(examples.candidates[i][:2]):
            found = real(batch.source[b, k], batch.source_mask[b, k])
            assert found == [*own, *attribute_tokens(HIGH), *CORPUS.passages[row].ids]
            ending = TOKENIZER.encode(INSTANCES[row].response)[-9:]
            assert found[-len(ending) :] == ending
    np.testing.assert_array_equal(batch.candidate_mask, [[True, True, False]] * 2)
    np.testing.assert_array_equal(batch.key_emotion[:, 2], -1)
    assert not batch.source_mask[:, 2].any()
    np.testing.assert_array_equal(batch.key_emotion[0, :2], emotion_ids(INSTANCES)[[6, 7]])
    assert batch.key_emotion[0, 0] == -1  # dialogue 3 has no emotion
    np.testing.assert_array_equal(batch.emotion, [2, -1])


@pytest.mark.parametrize("layout", ["apart", "own_tokens", "response"])
def test_the_other_layouts_row_by_row(layout):
    """Of instance 4, whose exemplars are 6 and 7: the context's passage and theirs, or theirs behind the context."""
    examples = exemplars(form(layout))
    batch = collated(examples, 4)
    own = [*attribute_tokens(LOW), *features.render_contexts(TOKENIZER, [INSTANCES[4].context], max_tokens=12)[0]]
    speaker, listener = (TOKENIZER.token_id(token) for token in features.EXEMPLAR_TURN_TOKENS)
    rows = []
    for i in (6, 7):
        turns = [*INSTANCES[i].context, INSTANCES[i].response] if layout != "response" else [INSTANCES[i].response]
        ids = [x for t, turn in enumerate(reversed(turns)) for x in
               reversed([(listener, speaker)[t % 2], *TOKENIZER.encode(turn)])][::-1]  # fmt: skip
        ids = features.keep_newest(ids, 10, (speaker, listener))
        rows.append([*attribute_tokens(HIGH), *ids])
    if layout == "own_tokens":
        expected = [*([*own, TOKENIZER.token_id(features.SEPARATOR), *row] for row in rows), []]
    else:
        expected = [own, *rows, []]
    assert [real(*row) for row in zip(batch.source[0], batch.source_mask[0], strict=True)] == expected
    assert batch.lead == (layout != "own_tokens")
    assert max(map(len, expected)) == examples.lengths[4, 0]


@pytest.mark.parametrize("layout", ["apart", "joined", "own_tokens", "response"])
def test_without_any_exemplar_a_source_is_the_context_alone(layout):
    alone = collated(ContextExamples(INSTANCES, form(layout)), 4, -1)
    rare = exemplars(form(layout), probability=0.0, num_random=2)
    none = exemplars(form(layout))
    none.set_candidates(np.full((len(INSTANCES), 3), -1))
    for examples in (rare, none):
        batch = collated(examples, 4, -1)
        np.testing.assert_array_equal(batch.source[:, 0], alone.source)
        np.testing.assert_array_equal(batch.source_mask[:, 0], alone.source_mask)
        assert not batch.source_mask[:, 1:].any()
        assert not batch.candidate_mask.any()


def test_a_share_of_rows_shows_no_exemplar():
    examples = exemplars(probability=0.3)
    rng = np.random.default_rng(0)
    shown = [examples.collate(np.arange(30), LENGTH, rng).candidate_mask[:, :2] for _ in range(40)]
    assert np.mean(shown) == pytest.approx(0.3, abs=0.04)
    assert (np.stack(shown)[..., 0] == np.stack(shown)[..., 1]).all()


def test_a_source_that_is_too_long_keeps_attributes_context_and_the_exemplars_response():
    examples = exemplars()
    i = int(np.argmax(examples.lengths[:, 0]))
    length = int(examples.lengths[i, 0]) - 4
    batch = collated(examples, i, length=length)
    row = examples.candidates[i][int(np.argmax([len(CORPUS.passages[r].ids) for r in examples.candidates[i][:2]]))]
    k = list(examples.candidates[i]).index(row)
    found = real(batch.source[0, k], batch.source_mask[0, k])
    assert len(found) <= length
    own = [*attribute_tokens(LOW), *examples.contexts[i].ids, TOKENIZER.token_id(features.SEPARATOR)]
    assert found[: len(own) + 4] == [*own, *attribute_tokens(HIGH)]
    kept = found[len(own) + 4 :]
    assert len(kept) < len(CORPUS.passages[row].ids)
    assert kept[1:] == CORPUS.passages[row].ids[-len(kept) + 1 :]  # its first is the token of the turn that was cut


def test_lengths_are_upper_bounds_of_what_is_collated():
    for examples in (exemplars(), ContextExamples(INSTANCES, form())):
        assert examples.lengths[:, 0].max() <= LENGTH
        for i in range(len(INSTANCES)):
            batch = collated(examples, i, length=int(examples.lengths[i, 0]))
            longest = batch.source_mask.reshape(-1, batch.source_mask.shape[-1]).sum(axis=1).max()
            assert examples.lengths[i, 0] - 1 <= longest <= examples.lengths[i, 0]


def test_new_candidates_replace_the_old_and_their_lengths():
    examples = exemplars()
    before = examples.lengths[:, 0].copy()
    examples.set_candidates(np.full((len(INSTANCES), 1), -1))
    assert (examples.lengths[:, 0] < before).all()
    longest = int(np.argmax([len(passage.ids) for passage in CORPUS.passages]))
    examples.set_candidates(np.full((len(INSTANCES), 1), longest))
    both = max(len(c.ids) for c in examples.contexts) + len(CORPUS.passages[longest].ids)
    assert examples.lengths[:, 0].max() == both + 8 + 1  # attributes of both and the separator


def test_random_candidates_are_never_of_the_own_dialogue():
    examples = exemplars(num_random=4)
    rng, seen = np.random.default_rng(0), set()
    for i in range(len(INSTANCES)):
        for _ in range(20):
            drawn = examples._random(i, rng)
            assert len(drawn) == 4
            assert INSTANCES[i].dialogue_id not in {INSTANCES[row].dialogue_id for row in drawn}
            seen.update(drawn)
    assert seen == set(range(len(INSTANCES)))  # and otherwise any
    batch = examples.collate(np.arange(6), LENGTH, rng)
    assert batch.source.shape[1] == 3 + 4
    assert batch.candidate_mask[:, 3:].all()


def test_a_corpus_of_one_dialogue_offers_no_random_candidate():
    corpus = Corpus.of(INSTANCES[:2], form(), TOKENIZER)
    examples = ExemplarExamples(INSTANCES[:2], corpus, np.full((2, 1), -1), form(), TOKENIZER, num_random=2)
    assert not collated(examples, 0, 1).candidate_mask.any()


def test_collating_is_a_pure_function_of_rows_length_and_rng():
    examples = exemplars(num_random=2)
    rows = (3, 9, 0)
    first = collated(examples, *rows, seed=5)
    collated(examples, *range(8), seed=1)
    assert_equal_batches(first, collated(examples, *rows, seed=5))
    other = collated(examples, *rows, seed=6)
    assert_equal_batches(first, other, equal=False)
    np.testing.assert_array_equal(first.source[:, :3], other.source[:, :3])  # the retrieved ones are given


def test_filler_rows_are_empty_and_invalid():
    for examples in (exemplars(num_random=2), ContextExamples(INSTANCES, form())):
        batch = collated(examples, 2, -1)
        np.testing.assert_array_equal(batch.valid, [True, False])
        assert batch.emotion[1] == -1
        masks = [value for name, value in vars(batch).items() if name.endswith("mask") and value is not None]
        assert len(masks) == (5 if isinstance(examples, ExemplarExamples) else 2)
        assert not any(mask[1].any() for mask in masks)


def test_embeddings_stand_in_for_keys():
    embeddings = np.arange(len(INSTANCES) * 4, dtype=np.float16).reshape(-1, 4)
    examples = exemplars(key_embeddings=embeddings)
    batch = collated(examples, 4)
    assert batch.key is None
    assert batch.key_mask is None
    assert batch.key_embedding.dtype == np.float32
    np.testing.assert_array_equal(batch.key_embedding[0, :2], embeddings[[6, 7]])
    read = collated(exemplars(), 4)
    assert read.key_embedding is None
    assert real(read.key[0, 1], read.key_mask[0, 1]) == CORPUS.keys[7]


def test_responses_are_there_on_request_and_cut():
    assert collated(exemplars(), 4).response is None
    examples = exemplars(response_tokens=3)
    batch = collated(examples, 4, -1)
    assert batch.response.shape == (*batch.candidate_mask.shape, 3)
    for column, row in ((0, 6), (1, 7)):
        expected = TOKENIZER.encode(INSTANCES[row].response)[:3]
        assert real(batch.response[0, column], batch.response_mask[0, column]) == expected
    assert not batch.response_mask[1].any()


def test_queries_read_the_newest_of_the_context_and_keys_the_response():
    queries, keys = encode_queries(TOKENIZER, INSTANCES, 9), encode_keys(TOKENIZER, INSTANCES, 11)
    for instance, query, key in zip(INSTANCES, queries, keys, strict=True):
        context = TOKENIZER.encode(" ".join(instance.context))
        assert query == [TOKENIZER.cls_id, *context[-7:], TOKENIZER.sep_id]
        both = TOKENIZER.encode(" ".join((*instance.context, instance.response)))
        assert key == [TOKENIZER.cls_id, *both[-9:], TOKENIZER.sep_id]


def test_a_query_may_be_the_reasons_alone_where_there_are_any():
    first, second = INSTANCES[:2]
    turn = len(first.context) - 1
    spans = [[turn, 0, 3], [turn, 4, 9]]
    marked = [dataclasses.replace(first, notes={"reasons": spans}), dataclasses.replace(second, notes={"reasons": []})]
    said = f"{first.context[turn][:3]} {first.context[turn][4:9]}"
    expected = encode_queries(TOKENIZER, [dataclasses.replace(first, context=(said,)), second], 9)
    assert encode_queries(TOKENIZER, marked, 9, "reasons") == expected
    assert encode_queries(TOKENIZER, marked, 9) == encode_queries(TOKENIZER, [first, second], 9) != expected


def test_a_key_may_be_the_response_alone_cut_on_the_right():
    for instance, key in zip(INSTANCES, encode_keys(TOKENIZER, INSTANCES, 5, "response"), strict=True):
        assert key == [TOKENIZER.cls_id, *TOKENIZER.encode(instance.response)[:3], TOKENIZER.sep_id]
    corpus = Corpus.of(INSTANCES, form(), TOKENIZER, "response")
    assert corpus.keys == encode_keys(TOKENIZER, INSTANCES, LAYOUT.max_key_tokens, "response")
    assert corpus.keys != CORPUS.keys


def test_dialogues_on_one_situation_are_one_group():
    """Whoever told it."""

    def groups(*situations):
        made = [
            dataclasses.replace(INSTANCES[2 * d], notes={"situation": text} if text else {})
            for d, text in enumerate(situations)
        ]
        return len(set(dialogue_groups(made).tolist()))

    assert groups("I lost my old dog", "i lost my  OLD dog", "I lost my old cat") == 2
    assert groups("", "") == 2


def test_groups_are_of_dialogues_and_the_same_in_every_process():
    groups = dialogue_groups(INSTANCES)
    assert groups.dtype == np.int32
    assert groups.min() >= 0
    assert len(set(groups.tolist())) == len({i.dialogue_id for i in INSTANCES}) == 15
    np.testing.assert_array_equal(groups[0::2], groups[1::2])
    assert groups[0] == 1932004804  # of "dialogue-0"


def test_levels_keep_the_shapes_few():
    texts = [[1] * n for n in (3, 20, 21, 60)]
    shape = lambda rows: pad_to_level(texts, rows, 0, 60)[0].shape  # noqa: E731
    assert shape([0]) == shape([1]) == shape([-1]) == (1, 20)
    assert shape([2, 0]) == (2, 40)
    assert shape([3]) == (1, 60)
    ids, mask = pad_to_level(texts, [2, -1], 9, 40)
    assert ids[0, 21] == 9
    assert mask.sum(axis=1).tolist() == [21, 0]


def test_an_accelerator_has_fewer_levels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    texts = [[1] * n for n in (3, 60, 81)]
    assert pad_to_level(texts, [0], 0, 60)[0].shape == (1, 60)
    assert pad_to_level(texts, [0, 1], 0, 200)[0].shape == (2, 80)
    assert pad_to_level(texts, [2], 0, 200)[0].shape == (1, 160)
