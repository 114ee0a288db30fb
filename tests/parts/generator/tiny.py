"""A tiny generator, and parameters that are not as training begins."""

import jax
import jax.numpy as jnp

from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.heads import EMOTION_HEAD
from empax.models.prompted import PromptedDecoder
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator
from tests.systems.learning import random_like

V, START, EOS, PAD = 20, 2, 1, 0
SIZES = {"vocab_size": V, "d_model": 16, "num_heads": 2, "head_dim": 8, "d_ff": 32, "dropout": 0.0}
MODEL = EncoderDecoder(TransformerConfig(**SIZES, num_encoder_layers=1, num_decoder_layers=1, start_id=START))
PROMPTED = PromptedDecoder(
    DecoderOnly(DecoderOnlyConfig(**SIZES, num_kv_heads=1, num_layers=1, max_positions=64)), (5, 6), START
)


def generator(decoding: DecodeSettings):
    return Generator(MODEL, Decoder(decoding, START, EOS, PAD), EMOTION_HEAD, emotion_weight=0.1)


def drawn(task, batch):
    return random_like(jax.eval_shape(task.init, jax.random.key(0), batch), seed=1)


def random_ids(rng, width):
    return jnp.asarray(rng.integers(3, V, (3, width)), jnp.int32)


def loss(task, params, given):
    """The loss without dropout, and what is logged."""
    return jax.jit(lambda p, b: task.loss(p, {}, b, jax.random.key(0), train=False))(params, given)
