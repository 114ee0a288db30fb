"""A small NEC over a vocabulary of digits, and batches for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from empax.data import features
from empax.decoding.settings import DecodeSettings
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.parts.generator.decoder import Decoder
from empax.systems.nec.examples import NecBatch
from empax.systems.nec.settings import SOCIAL, CandidateSettings
from empax.systems.nec.tasks import Contrastive, Nec
from tests.systems.learning import random_like

PAD, EOS, START, VOCAB, WIDTH = 0, 1, 2, 24, 16
BEAM = DecodeSettings("beam", 6, num_beams=3, rerank="similarity")
OWN = DecodeSettings("beam", 5, num_beams=2)


def model(*, social=True, **changes):
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=WIDTH, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1, num_decoder_layers=1,
        dropout=0.0, start_id=START, memories=(SOCIAL,) if social else (), **changes,
    )  # fmt: skip
    return EncoderDecoder(config)


def decoder(settings):
    return Decoder(settings, START, EOS, PAD)


def plain(*, social=True, settings=BEAM):
    return Nec(model(social=social), decoder(dataclasses.replace(settings, rerank="")), social)


def contrastive(*, social=True, decoding=BEAM, own=True, **contrast):
    explorer = decoder(OWN) if own else None
    settings = CandidateSettings(**contrast)
    return Contrastive(model(social=social), decoder(decoding), social, explorer, contrast=settings)


def rows(texts, width):
    return jax.tree.map(jnp.asarray, features.pad(texts, width, PAD))


def batch(targets, *, seed=0, width=8, social=True, facts=None, **candidates):
    """Random sources beside `targets`, which end with EOS; candidates are lists of texts for each row."""
    rng = np.random.default_rng(seed)
    sources = [rng.integers(3, VOCAB, rng.integers(3, 7)).tolist() for _ in targets]
    source, target = rows(sources, 7), rows(targets, width)
    made = {"source": source[0], "source_mask": source[1], "target": target[0], "target_mask": target[1]}
    given = dict(candidates)
    if social:
        drawn = [[rng.integers(3, VOCAB, rng.integers(1, 4)).tolist() for _ in range(5)] for _ in targets]
        given["facts"] = facts if facts is not None else drawn
    for name, texts in given.items():
        wide = 4 if name == "facts" else width
        ids, mask = rows([text for one in texts for text in one], wide)
        made |= {name: ids.reshape(len(targets), -1, wide), f"{name}_mask": mask.reshape(len(targets), -1, wide)}
    valid, emotion = jnp.ones(len(targets), bool), jnp.zeros(len(targets), jnp.int32)
    return NecBatch(**made, valid=valid, emotion=emotion)


def made_up(task, given):
    """Quicker than the parameters of `initial`, from which a model could learn."""
    return random_like(jax.eval_shape(task.init, jax.random.key(0), given), seed=1)


def initial(task, given, seed=0):
    def drawn(given):
        params = jax.jit(task.init)(jax.random.key(seed), given)
        return jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(9), leaf.shape), params)

    return jax.jit(drawn)(given)
