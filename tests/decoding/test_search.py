"""Search against Hugging Face's `generate`, on random trigram models that both sides read from one table."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from empax.decoding.search import generate, search_of
from empax.decoding.settings import DecodeSettings, num_hypotheses
from tests.decoding.hugging_face import found_by

PAD, EOS, START, VOCAB = 2, 1, 0, 40
IDS = {"start_id": START, "eos_id": EOS}
BATCH, LENGTH = 6, 12


def make_table(seed, *, batch=BATCH, vocab=VOCAB, end=1.5, spread=1.5):
    """Logits [B, V, V, V] of the next token, given the example and the two tokens before."""
    table = np.random.default_rng(seed).normal(size=(batch, vocab, vocab, vocab)).astype(np.float32) * spread
    table[..., EOS] += end
    return table


@flax.struct.dataclass
class TableCache:
    """Keeps the token before the latest of each hypothesis; the table, one per example, is never tiled."""

    table: jax.Array  # [B, V, V, V]
    before: jax.Array  # [B, K]

    def reorder(self, parents):
        return self.replace(before=jnp.take_along_axis(self.before, parents, axis=1))

    def take(self, rows):
        return self.replace(table=self.table[rows], before=self.before[rows])


def table_step(tokens, cache):
    rows = jnp.arange(tokens.shape[0])[:, None]
    return cache.table[rows, cache.before, tokens], cache.replace(before=tokens)


@functools.partial(jax.jit, static_argnames=("settings", "pad_id"))
def decode(table, settings, rng, pad_id=PAD):
    num = num_hypotheses(settings)
    cache = TableCache(table, jnp.full((table.shape[0], num), START, jnp.int32))
    return generate(table_step, cache, batch_size=len(table), **IDS, pad_id=pad_id, settings=settings, rng=rng)


def ours(table, settings, seed=0):
    return jax.tree.map(np.asarray, decode(jnp.asarray(table), settings, jax.random.key(seed)))


class TableConfig(PretrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """The same table as a Hugging Face model, without a cache."""

    config_class = TableConfig

    def __init__(self, table):
        super().__init__(TableConfig(vocab_size=table.shape[-1], num_hidden_layers=1))
        self.table = torch.nn.Parameter(torch.tensor(table), requires_grad=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids=None, attention_mask=None, **_):
        rows = torch.arange(len(input_ids)) // (len(input_ids) // len(self.table))
        before = input_ids[:, -2] if input_ids.shape[1] > 1 else torch.full_like(input_ids[:, 0], START)
        return CausalLMOutput(logits=self.table[rows, before, input_ids[:, -1]][:, None])

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids}


def theirs(table, settings):
    """Tokens [B, K, T] of Hugging Face's search, and the log-probabilities over lengths of its beams [B, K]."""
    num = settings.num_beams if settings.method == "beam" else 1
    beam = {"length_penalty": settings.length_penalty, "early_stopping": settings.early_stopping} if num > 1 else {}
    prompt = np.full((len(table), 1), START)
    return found_by(
        TableModel(table), prompt, np.ones_like(prompt), skip=1, num=num, new=LENGTH, eos=EOS, pad=PAD,
        bos_token_id=START, max_new_tokens=settings.max_tokens, min_new_tokens=settings.min_tokens or None,
        no_repeat_ngram_size=settings.no_repeat_ngram or None, use_cache=False, **beam,
    )  # fmt: skip


def lengths(tokens):
    """Tokens up to and including the end token."""
    ends = tokens == EOS
    return np.where(ends.any(-1), ends.argmax(-1) + 1, tokens.shape[-1])


def model_log_probs(table, tokens):
    """Sums of log-probabilities of [B, K, T] tokens, one table look-up at a time."""
    log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(table), axis=-1), np.float64)
    sums = np.zeros(tokens.shape[:2])
    for b, k in np.ndindex(*sums.shape):
        before, last = START, START
        for token in tokens[b, k, : lengths(tokens)[b, k]]:
            sums[b, k] += log_probs[b, before, last, token]
            before, last = last, token
    return sums


def beam(**changes):
    return DecodeSettings(method="beam", max_tokens=LENGTH, **changes)


BEAMS = [
    beam(num_beams=num, length_penalty=penalty, early_stopping=early, **rest)
    for num, penalty, early, rest in [
        (1, 2.0, False, {}),
        (2, 0.6, False, {}),
        (2, 1.0, True, {}),
        (2, 2.0, False, {"min_tokens": 4}),
        (4, 1.0, False, {}),
        (4, 0.6, True, {"no_repeat_ngram": 2}),
        (4, 2.0, False, {"no_repeat_ngram": 3}),
        (2, 0.6, "never", {}),
        (2, 2.0, "never", {}),
        (4, 2.0, "never", {}),
        (4, 0.0, "never", {}),
        (4, -1.0, "never", {}),
        (4, 0.0, False, {"min_tokens": 3, "no_repeat_ngram": 2}),
        (4, -1.0, False, {}),
        (4, 1.0, True, {"min_tokens": LENGTH}),
        (3, 1.0, False, {"no_repeat_ngram": 1}),
        (8, 2.0, True, {"min_tokens": 2, "no_repeat_ngram": 2}),
    ]
]


GREEDY = [
    DecodeSettings(max_tokens=LENGTH, min_tokens=least, no_repeat_ngram=size)
    for least, size in ((0, 0), (5, 0), (0, 1), (0, 2), (3, 3))
]


@pytest.mark.oracle
@pytest.mark.parametrize("settings", [*BEAMS, *GREEDY], ids=str)
def test_tokens_are_hugging_faces(settings):
    ended_early = 0
    for seed, end in enumerate([1.0, 2.5, 4.0]):  # 3 tables of 6 examples: long, medium and short responses
        table = make_table(seed, end=end)
        found = ours(table, settings)
        tokens, scores = theirs(table, settings)
        np.testing.assert_array_equal(found.tokens, tokens)
        ended_early += (lengths(tokens) < LENGTH).sum()
        if scores is not None:
            normalised = found.log_probs / lengths(tokens) ** settings.length_penalty
            np.testing.assert_allclose(normalised, scores, rtol=1e-5)
    assert ended_early or settings.min_tokens == LENGTH


@pytest.mark.parametrize(
    "settings",
    [
        DecodeSettings(max_tokens=LENGTH, min_tokens=2, no_repeat_ngram=2),
        beam(num_beams=4, min_tokens=2, no_repeat_ngram=2),
        DecodeSettings("sample", LENGTH, min_tokens=2, no_repeat_ngram=2, num_samples=3, temperature=0.7, top_k=5),
    ],
    ids=lambda settings: settings.method,
)
def test_log_probs_are_the_models_and_nothing_follows_the_end(settings):
    table = make_table(11, end=2.5)
    found = ours(table, settings)
    np.testing.assert_allclose(found.log_probs, model_log_probs(table, found.tokens), rtol=1e-5)
    after = np.arange(LENGTH) >= lengths(found.tokens)[..., None]
    assert after.any()
    assert (found.tokens[after] == PAD).all()
    assert (lengths(found.tokens) > settings.min_tokens).all()


def test_a_beam_as_wide_as_the_tree_finds_the_likeliest_response():
    table = make_table(5, batch=3, vocab=4, end=0.0)
    settings = DecodeSettings("beam", max_tokens=3, num_beams=32, length_penalty=0.0)
    found = ours(table, settings)
    every = np.array(list(np.ndindex(4, 4, 4)))
    for row in every:
        if EOS in row[:-1]:
            row[list(row).index(EOS) + 1 :] = PAD
    every = np.unique(every, axis=0)
    sums = model_log_probs(table, np.broadcast_to(every, (3, *every.shape)))
    np.testing.assert_array_equal(found.tokens[:, 0], every[sums.argmax(1)])
    np.testing.assert_allclose(found.log_probs[:, 0], sums.max(1), rtol=1e-5)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_the_loop_stops_when_every_row_has_ended(method):
    table = make_table(0, end=50.0)
    steps = []

    def counted(tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return table_step(tokens, cache)

    settings = DecodeSettings(method, max_tokens=LENGTH, num_beams=1)
    cache = TableCache(jnp.asarray(table), jnp.full((BATCH, 1), START, jnp.int32))
    rng = jax.random.key(0)
    found = generate(counted, cache, batch_size=BATCH, **IDS, pad_id=PAD, settings=settings, rng=rng)
    jax.effects_barrier()
    assert found.tokens.shape == (BATCH, 1, LENGTH)
    assert len(steps) == 1


def test_samples_come_likeliest_first_and_repeat_with_the_key():
    table = make_table(2, end=2.5)
    settings = DecodeSettings("sample", LENGTH, num_samples=5)
    one, again, other = ours(table, settings), ours(table, settings), ours(table, settings, seed=1)
    assert (np.diff(one.log_probs, axis=1) <= 0).all()
    np.testing.assert_array_equal(one.tokens, again.tokens)
    assert not np.array_equal(one.tokens, other.tokens)
    assert len(np.unique(one.tokens[0], axis=0)) > 1


def test_sampling_one_token_is_greedy():
    table = make_table(2, end=2.5)
    sampled = ours(table, DecodeSettings("sample", LENGTH, top_k=1))
    np.testing.assert_array_equal(sampled.tokens, ours(table, DecodeSettings(max_tokens=LENGTH)).tokens)


def test_sequences_are_drawn_as_often_as_the_model_says():
    table = make_table(1, batch=1, vocab=4, end=1.0, spread=0.7)
    found = ours(table, DecodeSettings("sample", max_tokens=3, num_samples=6000, rerank="random"))
    assert (np.diff(found.log_probs) > 0).any()  # in the order drawn, for whoever ranks them
    rows, counts = np.unique(found.tokens[0], axis=0, return_counts=True)
    expected = np.exp(model_log_probs(table, rows[None])[0]) * 6000
    assert expected.sum() == pytest.approx(6000, rel=2e-3)
    often = expected > 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum()
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def greedily(logits, num, source=None, prompt=None, **options):
    """The tokens that a model finds which always gives `logits`, by token."""
    row = jnp.zeros(VOCAB).at[jnp.array(list(logits))].set(jnp.array(list(logits.values())))
    found = generate(
        lambda tokens, cache: (jnp.broadcast_to(row, (*tokens.shape, VOCAB)), cache),
        None,  # remembers nothing
        batch_size=1,
        **IDS,
        pad_id=PAD,
        settings=DecodeSettings("greedy", num, **options),
        source=None if source is None else (jnp.array([source]), jnp.ones((1, 1), bool)),
        prompt=None if prompt is None else (jnp.array([prompt]), jnp.ones((1, 1), bool)),
    )
    return found.tokens[0, 0].tolist()


@pytest.mark.parametrize(
    ("source", "prompt", "other"), [((3,), None, 4), (None, (3,), 4), ((3,), (4,), 4), ((4,), (3,), 3)]
)
def test_the_source_is_the_prompt_unless_there_is_another(source, prompt, other):
    """Tokens 3 and 4 are the likeliest; a response that may not repeat the source takes the other one."""
    assert greedily({3: 9.0, 4: 9.0}, 2, source, prompt, encoder_no_repeat_ngram=1) == [other, other]


@pytest.mark.parametrize(("penalty", "tokens"), [(1.0, [3, 3, 3]), (1.5, [3, 4, 3])])
def test_a_penalty_sees_the_token_before(penalty, tokens):
    """Token 3 is the likeliest, 4 the next; once both stand there, 3 leads again."""
    assert greedily({3: 9.0, 4: 8.5}, 3, repetition_penalty=penalty) == tokens


PAUSED = [
    DecodeSettings(method="greedy", max_tokens=LENGTH),
    DecodeSettings(method="sample", max_tokens=LENGTH),
    DecodeSettings(method="beam", num_beams=4, max_tokens=LENGTH, no_repeat_ngram=2, early_stopping=True),
    DecodeSettings(method="beam", num_beams=3, max_tokens=LENGTH, length_penalty=0.0),
    DecodeSettings(method="beam", num_beams=4, max_tokens=LENGTH, length_penalty=2.0, early_stopping="never"),
    DecodeSettings(method="beam", num_beams=4, max_tokens=LENGTH, num_beam_groups=2, diversity_penalty=0.5),
]


@pytest.mark.parametrize("settings", PAUSED)
def test_a_search_that_pauses_finds_the_same_and_takes_nothing_back(settings):
    """Some rows end long before others; what is settled early is what the whole search says."""
    table = jnp.asarray(make_table(3, vocab=20, end=0.5)).at[0, ..., EOS].add(4.0)
    whole = ours(np.asarray(table), settings)

    @jax.jit
    def part(state, until, gone):
        search = search_of(
            table_step, batch_size=BATCH, start_id=START, eos_id=EOS, pad_id=PAD, settings=settings,
            rng=jax.random.key(0),
        )  # fmt: skip
        if state is None:
            cache = TableCache(table, jnp.full((BATCH, num_hypotheses(settings)), START, jnp.int32))
            return search.begin(cache), None, None
        state = search.go_on(search.without(state, gone), until)
        return state, search.progress(state), search.found(state)

    nobody, last = np.zeros(BATCH, bool), np.arange(BATCH) == BATCH - 1
    state, seen, before = part(None, 0, nobody)[0], [], np.zeros(BATCH, np.int32)
    for until in range(1, LENGTH + 1):
        state, progress, found = part(state, until, nobody)
        assert (np.asarray(progress.settled) >= before).all()
        before = np.asarray(progress.settled)
        for row, count in enumerate(before):
            np.testing.assert_array_equal(progress.tokens[row, :count], whole.tokens[row, 0, :count])
            if progress.ended[row]:
                np.testing.assert_array_equal(progress.tokens[row], whole.tokens[row, 0])
        seen.append((int(before.sum()), np.asarray(progress.ended)))
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.log_probs, whole.log_probs)
    assert seen[-1][1].all()
    assert 0 < seen[LENGTH // 2][0] < seen[-1][0]  # some is told in the middle
    assert not seen[1][1].all()
    state = part(part(None, 0, nobody)[0], 2, nobody)[0]
    few = jnp.array([4, 0, 1])
    search = search_of(table_step, batch_size=3, start_id=START, eos_id=EOS, pad_id=PAD, settings=settings,
                       rng=jax.random.key(0))  # fmt: skip
    if settings.method != "sample":  # whose key all rows share
        chosen = jax.jit(lambda state: search.found(search.go_on(search.take(state, few))))(state)
        np.testing.assert_array_equal(chosen.tokens, whole.tokens[few])
    state, progress, found = part(state, LENGTH, last)
    assert progress.ended[-1]
    np.testing.assert_array_equal(found.tokens[:-1], whole.tokens[:-1])  # who leaves changes nothing of the others
