"""Groups of beams against the published algorithm in plain Python (Vijayakumar et al. 2018, Algorithm 1)."""

import functools
import itertools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings, num_hypotheses

VOCAB, EOS, OTHER, PAD, LENGTH, BATCH = 9, 1, 4, 2, 6, 5


@flax.struct.dataclass
class Bigrams:
    """Logits [B, V, V] of the next token, given one; sharper from step to step, so that no two orders are alike."""

    table: jax.Array
    taken: jax.Array  # [B, K], what each hypothesis has read last
    steps: jax.Array

    def reorder(self, parents):
        return self.replace(taken=jnp.take_along_axis(self.taken, parents, axis=1))


def table(seed=0):
    logits = np.random.default_rng(seed).normal(size=(BATCH, VOCAB, VOCAB)).astype(np.float32) * 1.5
    logits[..., EOS] -= 0.5
    return logits


@functools.partial(jax.jit, static_argnums=1)
def decode(logits, settings):
    def step(tokens, cache):
        # Also what the cache says was read: a wrong order of hypotheses changes the logits.
        rows = jnp.arange(BATCH)[:, None]
        own = cache.table[rows, tokens] + 0.3 * cache.table[rows, cache.taken]
        return own * (1.0 + 0.05 * cache.steps), cache.replace(taken=tokens, steps=cache.steps + 1.0)

    cache = Bigrams(logits, jnp.zeros((BATCH, num_hypotheses(settings)), jnp.int32), jnp.zeros(()))
    return generate(step, cache, batch_size=BATCH, start_id=0, eos_id=EOS, pad_id=PAD, settings=settings)


def log_probs(table, tokens):
    """Of what follows `tokens`."""
    before = tokens[-2] if len(tokens) > 1 else 0
    logits = (table[tokens[-1]] + 0.3 * table[before]).astype(np.float64) * (1.0 + 0.05 * (len(tokens) - 1))
    return logits - np.log(np.exp(logits).sum())


def search(table, groups, width, penalty, ends, length_penalty):
    """The hypotheses of all groups, best first: (score, tokens without the start)."""
    running = [[(0.0, (0,))] for _ in range(groups)]
    pools, done = [[] for _ in range(groups)], [False] * groups
    for length in range(1, LENGTH + 1):
        taken = np.zeros(VOCAB)
        for group in range(groups):
            found = []
            for score, tokens in running[group]:
                scores = score + log_probs(table, tokens) - penalty * taken
                found += [(scores[token], (*tokens, token)) for token in range(VOCAB)]
            found = sorted(found, reverse=True)[: max(2, 1 + len(ends)) * width]
            stops = [tokens[-1] in ends or length == LENGTH for _, tokens in found]
            if not done[group]:
                pools[group] += [
                    (score / length**length_penalty, tokens[1:])
                    for (score, tokens), stop in list(zip(found, stops, strict=True))[:width]
                    if stop
                ]
                pools[group] = sorted(pools[group], reverse=True)[:width]
            running[group] = [one for one in found if one[1][-1] not in ends][:width]
            for _, tokens in running[group]:
                taken[tokens[-1]] += 1
            if running[group] and len(pools[group]) == width:
                done[group] |= running[group][0][0] / length**length_penalty <= pools[group][-1][0]
    return sorted(itertools.chain(*pools), reverse=True)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("groups", "width", "penalty", "more"),
    [(2, 2, 0.7, ()), (3, 1, 1.5, ()), (2, 3, 0.3, (OTHER,)), (2, 2, 0.0, ()), (1, 3, 0.0, (OTHER,))],
)
def test_hypotheses_are_those_of_the_published_algorithm(groups, width, penalty, more):
    settings = DecodeSettings(
        "beam",
        LENGTH,
        num_beams=groups * width,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        more_eos_ids=more,
        length_penalty=0.8,
    )
    found = jax.tree.map(np.asarray, decode(jnp.asarray(table()), settings))
    for row, logits in enumerate(table()):
        expected = search(logits, groups, width, penalty, (EOS, *more), 0.8)
        assert len(expected) == groups * width
        for k, (score, tokens) in enumerate(expected):
            padded = [*tokens, *[PAD] * (LENGTH - len(tokens))]
            np.testing.assert_array_equal(found.tokens[row, k], padded)
            np.testing.assert_allclose(found.log_probs[row, k] / len(tokens) ** 0.8, score, rtol=1e-5)


def test_fewer_hypotheses_are_returned_where_fewer_are_asked_for():
    logits = jnp.asarray(table())
    all_of_them = decode(logits, DecodeSettings("beam", LENGTH, num_beams=3))
    best = decode(logits, DecodeSettings("beam", LENGTH, num_beams=3, num_return_sequences=2))
    np.testing.assert_array_equal(best.tokens, all_of_them.tokens[:, :2])
    np.testing.assert_array_equal(best.log_probs, all_of_them.log_probs[:, :2])


@pytest.mark.parametrize(("method", "carried"), [("greedy", 4), ("beam", 8)])
def test_options_that_are_off_carry_nothing_through_the_loop(method, carried):
    def arrays(settings):
        jaxpr = jax.make_jaxpr(decode, static_argnums=1)(jnp.asarray(table()), settings).jaxpr
        inner = [eqn.params["jaxpr"].jaxpr.eqns for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
        (loop,) = [eqn for eqn in itertools.chain(*inner) if eqn.primitive.name == "while"]
        return len(loop.outvars), len(loop.params["body_jaxpr"].jaxpr.eqns)

    plain = DecodeSettings(method, LENGTH, num_beams=2)
    cache = 2  # the table is no part of what changes
    assert arrays(plain)[0] == carried + cache
    dear = DecodeSettings(method, LENGTH, num_beams=2, repetition_penalty=1.5, no_repeat_ngram=2)
    assert arrays(dear)[0] == carried + cache
    assert arrays(dear)[1] > arrays(plain)[1]
