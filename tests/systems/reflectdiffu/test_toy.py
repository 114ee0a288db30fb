"""A toy whose contexts name the listener's intent by a word: what labels teach, and what shuffled ones do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from empax.decoding.settings import DecodeSettings
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.reflectdiffu.examples import NO_PRIOR, ReflectBatch
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.reinforced import ReinforcedReflectDiffu
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings

ROWS, WORDS, FIRST, V = 64, 5, 4, 40
STEPS, ASKED = 200, 900


def test_an_action_stays_the_intent_that_was_drawn_whatever_emotion_is_found_later():
    task, _, _, _ = toy()
    batch = contexts(np.random.default_rng(0), 4)
    params = jax.jit(task.init)(jax.random.key(0), batch)
    rolled = jax.jit(task.rollout)(params, {}, batch, jax.random.key(1))
    np.testing.assert_array_equal(rolled.actions, [[0, 1, 2]] * 4)
    other = dataclasses.replace(task, references=((5, 6, 7),) * 32)  # as of another emotion
    thought = jax.jit(lambda params, rolled: other.think(params, rolled, noise=None))(params, rolled)
    np.testing.assert_array_equal(thought.second, rolled.action)


def contexts(rng, rows):
    """One word of each says the intent, somewhere among others."""
    intent = rng.integers(len(INTENTS), size=rows).astype(np.int32)
    source = rng.integers(FIRST + len(INTENTS), V, (rows, WORDS)).astype(np.int32)
    source[np.arange(rows), rng.integers(WORDS, size=rows)] = FIRST + intent
    one, all_true = np.full((rows, 1), FIRST, np.int32), np.ones(rows, bool)
    zeros = np.zeros(rows, np.int32)
    batch = ReflectBatch(
        source=source, source_mask=np.ones(source.shape, bool), target=one, target_mask=one > 0, valid=all_true,
        emotion=zeros - 1, polarity=zeros, turns=zeros + 1, intent=intent, prior=np.stack([NO_PRIOR] * rows),
        number=zeros, piece=None, piece_mask=None, told=None, place=None,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch)


@functools.cache
def toy():
    stage = GeneratorTaskSettings(
        reasons="", intents="", experts="none", mimicry=False, copying=False, intent_start=False, emotion_weight=0.0
    )
    model = EncoderDecoder(
        WordLevelSettings(d_model=32, num_heads=2, head_dim=16, d_ff=32).config(V, 2, tie_embeddings=False)
    )
    decoder = Decoder(DecodeSettings("greedy", 2), 2, 1, 0)
    task = ReinforcedReflectDiffu(model, decoder, stage, None, ((0, 1, 2),) * 32)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state, memory, batch, rng):
        rolled, memory, _ = task.credit({}, task.rollout(params, {}, batch, rng), memory)
        grads = jax.grad(lambda params: task.loss(params, {}, rolled, rng, train=True)[0].value())(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, memory

    return task, optimizer, step, jax.jit(lambda params, batch: task.read(params, batch)["intent_prediction"])


def accuracy(*, strange):
    """Of the final intent on new contexts, in percent; `strange`: trained on intents of other contexts."""
    task, optimizer, step, read = toy()
    rng = np.random.default_rng(0)
    params = jax.jit(task.init)(jax.random.key(0), contexts(rng, ROWS))
    state, memory = optimizer.init(params), task.init_memory()
    for number in range(STEPS):
        batch = contexts(rng, ROWS)
        if strange:
            batch = batch.replace(intent=contexts(rng, ROWS).intent)  # permuted in a batch, some would stay
        params, state, memory = step(params, state, memory, batch, jax.random.key(number))
    asked = contexts(rng, ASKED)
    return 100.0 * float(jnp.mean(read(params, asked) == asked.intent))


@pytest.mark.slow
def test_intents_are_learnt_from_their_labels_and_those_of_other_contexts_teach_nothing():
    """Chance is 1 of 9, 11.1 percent. A policy that took what it drew for the label would succeed with either."""
    assert accuracy(strange=False) > 95.0
    chance = 100.0 / len(INTENTS)
    deviation = 100.0 * (chance / 100.0 * (1.0 - chance / 100.0) / ASKED) ** 0.5
    assert accuracy(strange=True) == pytest.approx(chance, abs=4.0 * deviation)
