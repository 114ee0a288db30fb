"""A tiny generator, and parameters that are not as training begins."""

import jax
import jax.numpy as jnp

from empax.decoding.settings import DecodeSettings
from empax.models.heads import EMOTION_HEAD
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator
from tests.systems.learning import random_like

V = 20
MODEL = EncoderDecoder(
    TransformerConfig(
        vocab_size=V, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1, num_decoder_layers=1,
        dropout=0.0, start_id=2,
    )
)  # fmt: skip


def generator(decoding: DecodeSettings):
    return Generator(MODEL, Decoder(decoding, 2, 1, 0), EMOTION_HEAD, emotion_weight=0.1)


def drawn(task, batch):
    return random_like(jax.eval_shape(task.init, jax.random.key(0), batch), seed=1)


def random_ids(rng, width):
    return jnp.asarray(rng.integers(3, V, (3, width)), jnp.int32)


def loss(task, params, given):
    """The loss without dropout, and what is logged."""
    return jax.jit(lambda p, b: task.loss(p, {}, b, jax.random.key(0), train=False))(params, given)
