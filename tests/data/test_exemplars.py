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
from empax.data.tokenizers import SPEAKER_TOKEN

LAYOUT = LayoutSettings(
    max_context_tokens=12, max_passage_tokens=10, max_target_tokens=6, max_query_tokens=9, max_key_tokens=11
)
LENGTH = LAYOUT.max_source_tokens
WORDS = (
    "i",
    "feel",
    "so",
    "sad",
    "about",
    "my",
    "old",
    "dog",
    "and",
    "you",
    "are",
    "very",
    "kind",
    "to",
    "say",
    "that",
)
LOW = dict.fromkeys(ATTRIBUTES, "low")
HIGH = dict.fromkeys(ATTRIBUTES, "high")


def make_instances(count=30, seed=0):
    """Two instances for each dialogue, the second with the first's turns in its context."""
    rng = np.random.default_rng(seed)
    made = []
    for d in range(count // 2):
        turns = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(4)]
        emotion = EMOTIONS[d] if d != 3 else ""
        for end in (1, 3):
            notes = {"context_attributes": LOW, "response_attributes": HIGH}
            made.append(Instance(f"dialogue-{d}#{end + 1}", tuple(turns[:end]), turns[end], emotion, notes))
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([" ".join(WORDS)], vocab_size=400, special_tokens=features.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def instances():
    return make_instances()


@pytest.fixture(scope="module")
def corpus(tokenizer, instances):
    return Corpus.of(instances, TaggedForm(tokenizer, LAYOUT, True, "joined"), tokenizer)


def exemplars(tokenizer, instances, corpus, *, attributes=True, layout="joined", **options):
    """Candidates of instance i: the two instances of the next dialogue, then nothing."""
    start = (np.arange(len(instances)) // 2 * 2 + 2) % len(instances)
    candidates = np.stack([start, start + 1, np.full_like(start, -1)], axis=1)
    return ExemplarExamples(
        instances, corpus, candidates, TaggedForm(tokenizer, LAYOUT, attributes, layout), tokenizer, **options
    )


def attribute_tokens(tokenizer, levels):
    return [tokenizer.token_id(features.attribute_token(name, levels[name])) for name in ATTRIBUTES]


def real(ids, mask):
    return ids[mask].tolist()


def assert_equal_batches(one, two, *, equal=True):
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)]
    assert all(same) is equal


# ------------------------------------------------------------------------------------------------------- context alone


def test_a_source_is_attributes_then_context_and_no_response(tokenizer, instances):
    examples = ContextExamples(instances, TaggedForm(tokenizer, LAYOUT, True))
    assert isinstance(examples, Examples)
    batch = examples.collate(np.array([0, 1]), LENGTH, np.random.default_rng(0))
    for b in range(2):
        found = real(batch.source[b], batch.source_mask[b])
        assert found[:4] == attribute_tokens(tokenizer, LOW)
        speaker = tokenizer.token_id(SPEAKER_TOKEN)
        assert found[4] in (speaker, tokenizer.token_id("<listener>"))
        expected = features.render_contexts(tokenizer, [instances[b].context], max_tokens=12)[0]
        assert found[4:] == expected
        target = [*tokenizer.encode(instances[b].response)[:5], tokenizer.eos_id]
        assert real(batch.target[b], batch.target_mask[b]) == target
    np.testing.assert_array_equal(batch.emotion, [0, 0])


def test_without_attributes_not_one_of_their_tokens_is_anywhere(tokenizer, instances):
    every = {tokenizer.token_id(token) for token in features.ATTRIBUTE_TOKENS}
    bare = Corpus.of(instances, TaggedForm(tokenizer, LAYOUT, False), tokenizer)
    for examples in (
        ContextExamples(instances, TaggedForm(tokenizer, LAYOUT, False)),
        exemplars(tokenizer, instances, bare, attributes=False, num_random=2),
    ):
        batch = examples.collate(np.arange(10), LENGTH, np.random.default_rng(0))
        assert not every & set(np.unique(batch.source).tolist())
    batch = exemplars(
        tokenizer, instances, Corpus.of(instances, TaggedForm(tokenizer, LAYOUT, True), tokenizer)
    ).collate(np.arange(10), LENGTH, np.random.default_rng(0))
    # four of the context and four of the exemplar in every real source
    counts = np.isin(batch.source, list(every)).sum(axis=2)
    np.testing.assert_array_equal(counts[:, :2], 8)


# ------------------------------------------------------------------------------------------------------ with exemplars


def test_joined_every_passage_is_the_context_beside_one_exemplar_with_its_response(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus)
    batch = examples.collate(np.array([4, 7]), LENGTH, np.random.default_rng(0))
    assert batch.source.shape == (2, 3, LENGTH)
    for b, i in enumerate((4, 7)):
        own = [*attribute_tokens(tokenizer, LOW), *examples.contexts[i].ids, tokenizer.token_id(features.SEPARATOR)]
        for k, row in enumerate(examples.candidates[i][:2]):
            found = real(batch.source[b, k], batch.source_mask[b, k])
            assert found == [*own, *attribute_tokens(tokenizer, HIGH), *corpus.passages[row].ids]
            ending = tokenizer.encode(instances[row].response)[-9:]
            assert found[-len(ending) :] == ending
    np.testing.assert_array_equal(batch.candidate_mask, [[True, True, False]] * 2)
    np.testing.assert_array_equal(batch.key_emotion[:, 2], -1)
    assert not batch.source_mask[:, 2].any()
    np.testing.assert_array_equal(batch.key_emotion[0, :2], emotion_ids(instances)[[6, 7]])
    assert batch.key_emotion[0, 0] == -1  # dialogue 3 has no emotion
    np.testing.assert_array_equal(batch.emotion, [2, -1])


@pytest.mark.parametrize("layout", ["apart", "own_tokens", "response"])
def test_the_other_layouts_row_by_row(tokenizer, instances, layout):
    """Of instance 4, whose exemplars are 6 and 7: the context's passage and theirs, or theirs behind the context."""
    form = TaggedForm(tokenizer, LAYOUT, True, layout)
    examples = exemplars(tokenizer, instances, Corpus.of(instances, form, tokenizer), layout=layout)
    batch = examples.collate(np.array([4]), LENGTH, np.random.default_rng(0))
    own = [
        *attribute_tokens(tokenizer, LOW),
        *features.render_contexts(tokenizer, [instances[4].context], max_tokens=12)[0],
    ]
    speaker, listener = (tokenizer.token_id(token) for token in features.EXEMPLAR_TURN_TOKENS)
    rows = []
    for i in (6, 7):
        turns = [*instances[i].context, instances[i].response] if layout != "response" else [instances[i].response]
        ids = [x for t, turn in enumerate(reversed(turns)) for x in
               reversed([(listener, speaker)[t % 2], *tokenizer.encode(turn)])][::-1]  # fmt: skip
        ids = features.keep_newest(ids, 10, (speaker, listener))
        rows.append([*attribute_tokens(tokenizer, HIGH), *ids])
    if layout == "own_tokens":
        expected = [*([*own, tokenizer.token_id(features.SEPARATOR), *row] for row in rows), []]
    else:
        expected = [own, *rows, []]
    assert [real(*row) for row in zip(batch.source[0], batch.source_mask[0], strict=True)] == expected
    assert batch.lead == (layout != "own_tokens")
    assert max(map(len, expected)) == examples.lengths[4, 0]


@pytest.mark.parametrize("layout", ["apart", "joined", "own_tokens", "response"])
def test_without_any_exemplar_a_source_is_the_context_alone(tokenizer, instances, layout):
    form = TaggedForm(tokenizer, LAYOUT, True, layout)
    alone = ContextExamples(instances, form).collate(np.array([4, -1]), LENGTH, np.random.default_rng(0))
    corpus = Corpus.of(instances, form, tokenizer)
    rare = exemplars(tokenizer, instances, corpus, layout=layout, probability=0.0, num_random=2)
    none = exemplars(tokenizer, instances, corpus, layout=layout)
    none.set_candidates(np.full((len(instances), 3), -1))
    for examples in (rare, none):
        batch = examples.collate(np.array([4, -1]), LENGTH, np.random.default_rng(0))
        np.testing.assert_array_equal(batch.source[:, 0], alone.source)
        np.testing.assert_array_equal(batch.source_mask[:, 0], alone.source_mask)
        assert not batch.source_mask[:, 1:].any()
        assert not batch.candidate_mask.any()


def test_a_share_of_rows_shows_no_exemplar(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus, probability=0.3)
    rng = np.random.default_rng(0)
    shown = [examples.collate(np.arange(30), LENGTH, rng).candidate_mask[:, :2] for _ in range(40)]
    assert np.mean(shown) == pytest.approx(0.3, abs=0.04)
    assert (np.stack(shown)[..., 0] == np.stack(shown)[..., 1]).all()


def test_a_source_that_is_too_long_keeps_attributes_context_and_the_exemplars_response(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus)
    i = int(np.argmax(examples.lengths[:, 0]))
    length = int(examples.lengths[i, 0]) - 4
    batch = examples.collate(np.array([i]), length, np.random.default_rng(0))
    row = examples.candidates[i][int(np.argmax([len(corpus.passages[r].ids) for r in examples.candidates[i][:2]]))]
    k = list(examples.candidates[i]).index(row)
    found = real(batch.source[0, k], batch.source_mask[0, k])
    assert len(found) <= length
    own = [*attribute_tokens(tokenizer, LOW), *examples.contexts[i].ids, tokenizer.token_id(features.SEPARATOR)]
    assert found[: len(own) + 4] == [*own, *attribute_tokens(tokenizer, HIGH)]
    kept = found[len(own) + 4 :]
    assert len(kept) < len(corpus.passages[row].ids)
    assert kept[1:] == corpus.passages[row].ids[-len(kept) + 1 :]  # its first is the token of the turn that was cut


def test_lengths_are_upper_bounds_of_what_is_collated(tokenizer, instances, corpus):
    for examples in (
        exemplars(tokenizer, instances, corpus),
        ContextExamples(instances, TaggedForm(tokenizer, LAYOUT, True)),
    ):
        assert examples.lengths[:, 0].max() <= LENGTH
        for i in range(len(instances)):
            batch = examples.collate(np.array([i]), int(examples.lengths[i, 0]), np.random.default_rng(0))
            longest = batch.source_mask.reshape(-1, batch.source_mask.shape[-1]).sum(axis=1).max()
            assert examples.lengths[i, 0] - 1 <= longest <= examples.lengths[i, 0]


def test_new_candidates_replace_the_old_and_their_lengths(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus)
    before = examples.lengths[:, 0].copy()
    examples.set_candidates(np.full((len(instances), 1), -1))
    assert (examples.lengths[:, 0] < before).all()
    longest = int(np.argmax([len(passage.ids) for passage in corpus.passages]))
    examples.set_candidates(np.full((len(instances), 1), longest))
    both = max(len(c.ids) for c in examples.contexts) + len(corpus.passages[longest].ids)
    assert examples.lengths[:, 0].max() == both + 8 + 1  # attributes of both and the separator


def test_random_candidates_are_never_of_the_own_dialogue(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus, num_random=4)
    rng, seen = np.random.default_rng(0), set()
    for i in range(len(instances)):
        for _ in range(20):
            drawn = examples._random(i, rng)
            assert len(drawn) == 4
            assert instances[i].dialogue_id not in {instances[row].dialogue_id for row in drawn}
            seen.update(drawn)
    assert seen == set(range(len(instances)))  # and otherwise any
    batch = examples.collate(np.arange(6), LENGTH, rng)
    assert batch.source.shape[1] == 3 + 4
    assert batch.candidate_mask[:, 3:].all()


def test_a_corpus_of_one_dialogue_offers_no_random_candidate(tokenizer, instances):
    corpus = Corpus.of(instances[:2], TaggedForm(tokenizer, LAYOUT, True), tokenizer)
    examples = ExemplarExamples(
        instances[:2], corpus, np.full((2, 1), -1), TaggedForm(tokenizer, LAYOUT, True), tokenizer, num_random=2
    )
    batch = examples.collate(np.arange(2), LENGTH, np.random.default_rng(0))
    assert not batch.candidate_mask.any()


def test_collating_is_a_pure_function_of_rows_length_and_rng(tokenizer, instances, corpus):
    examples = exemplars(tokenizer, instances, corpus, num_random=2)
    rows = np.array([3, 9, 0])
    first = examples.collate(rows, LENGTH, np.random.default_rng(5))
    examples.collate(np.arange(8), LENGTH, np.random.default_rng(1))
    assert_equal_batches(first, examples.collate(rows, LENGTH, np.random.default_rng(5)))
    other = examples.collate(rows, LENGTH, np.random.default_rng(6))
    assert_equal_batches(first, other, equal=False)
    np.testing.assert_array_equal(first.source[:, :3], other.source[:, :3])  # the retrieved ones are given


def test_filler_rows_are_empty_and_invalid(tokenizer, instances, corpus):
    for examples in (
        exemplars(tokenizer, instances, corpus, num_random=2),
        ContextExamples(instances, TaggedForm(tokenizer, LAYOUT, True)),
    ):
        batch = examples.collate(np.array([2, -1]), LENGTH, np.random.default_rng(0))
        np.testing.assert_array_equal(batch.valid, [True, False])
        assert batch.emotion[1] == -1
        assert not batch.source_mask[1].any()
        assert not batch.target_mask[1].any()
    batch = exemplars(tokenizer, instances, corpus, num_random=2).collate(
        np.array([2, -1]), LENGTH, np.random.default_rng(0)
    )
    for mask in (batch.candidate_mask, batch.query_mask, batch.key_mask):
        assert not mask[1].any()


def test_embeddings_stand_in_for_keys(tokenizer, instances, corpus):
    embeddings = np.arange(len(instances) * 4, dtype=np.float16).reshape(-1, 4)
    examples = exemplars(tokenizer, instances, corpus, key_embeddings=embeddings)
    batch = examples.collate(np.array([4]), LENGTH, np.random.default_rng(0))
    assert batch.key is None
    assert batch.key_mask is None
    assert batch.key_embedding.dtype == np.float32
    np.testing.assert_array_equal(batch.key_embedding[0, :2], embeddings[[6, 7]])
    read = exemplars(tokenizer, instances, corpus).collate(np.array([4]), LENGTH, np.random.default_rng(0))
    assert read.key_embedding is None
    assert real(read.key[0, 1], read.key_mask[0, 1]) == corpus.keys[7]


def test_responses_are_there_on_request_and_cut(tokenizer, instances, corpus):
    assert (
        exemplars(tokenizer, instances, corpus).collate(np.array([4]), LENGTH, np.random.default_rng(0)).response
        is None
    )
    examples = exemplars(tokenizer, instances, corpus, response_tokens=3)
    batch = examples.collate(np.array([4, -1]), LENGTH, np.random.default_rng(0))
    assert batch.response.shape == (*batch.candidate_mask.shape, 3)
    for column, row in ((0, 6), (1, 7)):
        expected = tokenizer.encode(instances[row].response)[:3]
        assert real(batch.response[0, column], batch.response_mask[0, column]) == expected
    assert not batch.response_mask[1].any()


# --------------------------------------------------------------------------------------------------- queries and groups


def test_queries_read_the_newest_of_the_context_and_keys_the_response(tokenizer, instances):
    queries, keys = encode_queries(tokenizer, instances, 9), encode_keys(tokenizer, instances, 11)
    for instance, query, key in zip(instances, queries, keys, strict=True):
        context = tokenizer.encode(" ".join(instance.context))
        assert query == [tokenizer.cls_id, *context[-7:], tokenizer.sep_id]
        both = tokenizer.encode(" ".join((*instance.context, instance.response)))
        assert key == [tokenizer.cls_id, *both[-9:], tokenizer.sep_id]


def test_a_query_may_be_the_reasons_alone_where_there_are_any(tokenizer, instances):
    first, second = instances[:2]
    turn = len(first.context) - 1
    spans = [[turn, 0, 3], [turn, 4, 9]]
    marked = [dataclasses.replace(first, notes={"reasons": spans}), dataclasses.replace(second, notes={"reasons": []})]
    said = f"{first.context[turn][:3]} {first.context[turn][4:9]}"
    expected = encode_queries(tokenizer, [dataclasses.replace(first, context=(said,)), second], 9)
    assert encode_queries(tokenizer, marked, 9, "reasons") == expected
    assert encode_queries(tokenizer, marked, 9) == encode_queries(tokenizer, [first, second], 9) != expected


def test_a_key_may_be_the_response_alone_cut_on_the_right(tokenizer, instances):
    for instance, key in zip(instances, encode_keys(tokenizer, instances, 5, "response"), strict=True):
        assert key == [tokenizer.cls_id, *tokenizer.encode(instance.response)[:3], tokenizer.sep_id]
    form = TaggedForm(tokenizer, LAYOUT, True)
    corpus = Corpus.of(instances, form, tokenizer, "response")
    assert corpus.keys == encode_keys(tokenizer, instances, LAYOUT.max_key_tokens, "response")
    assert corpus.keys != Corpus.of(instances, form, tokenizer).keys


def test_dialogues_on_one_situation_are_one_group(instances):
    """Whoever told it."""

    def groups(*situations):
        made = [
            dataclasses.replace(instances[2 * d], notes={"situation": text} if text else {})
            for d, text in enumerate(situations)
        ]
        return len(set(dialogue_groups(made).tolist()))

    assert groups("I lost my old dog", "i lost my  OLD dog", "I lost my old cat") == 2
    assert groups("", "") == 2


def test_groups_are_of_dialogues_and_the_same_in_every_process(instances):
    groups = dialogue_groups(instances)
    assert groups.dtype == np.int32
    assert groups.min() >= 0
    assert len(set(groups.tolist())) == len({i.dialogue_id for i in instances}) == 15
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
