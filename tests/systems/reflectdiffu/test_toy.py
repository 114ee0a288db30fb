"""A toy whose contexts name the listener's intent by a word: what a drawn action stays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from empax.decoding.settings import DecodeSettings
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.word_level import WordLevelSettings
from empax.systems.reflectdiffu.examples import NO_PRIOR, ReflectBatch
from empax.systems.reflectdiffu.labels import INTENTS
from empax.systems.reflectdiffu.reinforced import ReinforcedReflectDiffu
from empax.systems.reflectdiffu.settings import GeneratorTaskSettings

WORDS, FIRST, V = 5, 4, 40


def test_an_action_stays_the_intent_that_was_drawn_whatever_emotion_is_found_later():
    task = toy()
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


def toy():
    stage = GeneratorTaskSettings(
        reasons="", intents="", experts="none", mimicry=False, copying=False, intent_start=False, emotion_weight=0.0
    )
    model = EncoderDecoder(
        WordLevelSettings(d_model=32, num_heads=2, head_dim=16, d_ff=32).config(V, 2, tie_embeddings=False)
    )
    decoder = Decoder(DecodeSettings("greedy", 2), 2, 1, 0)
    return ReinforcedReflectDiffu(model, decoder, stage, None, ((0, 1, 2),) * 32)
