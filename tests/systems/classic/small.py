"""Small models of each form, on a made-up batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from empax.core.tree import named_leaves
from empax.decoding.settings import DecodeSettings
from empax.parts.generator.decoder import Decoder
from empax.systems.classic.examples import ClassicExamples
from empax.systems.classic.model import Classic
from empax.systems.classic.readers import ClassicBatch, ConceptWords, EmotionSettings, FactTexts
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.task import ClassicTask
from tests.systems.learning import random_like

VOCAB, START, END, PAD = 30, 2, 1, 0
SMALL = {"d_model": 12, "num_heads": 2, "head_dim": 4, "d_ff": 6, "num_decoder_layers": 1}
FORMS = {
    "transformer": {},
    "multi_trs": {"readers": ("emotion",)},
    "moel": {"readers": ("emotion", "listeners")},
    "mime": {"readers": ("mimicry",)},
    "empdg": {"readers": ("emotion_words", "emotion"), "emotion": EmotionSettings(start=True)},
    "cem": {"readers": ("refinement", "emotion")},
    "case": {"readers": ("alignment",)},
    "kemp": {"readers": ("concepts", "emotion"), "emotion": EmotionSettings(start=True), "copies": True},
}


def in_torch(params):
    """Leaves by their names, as what PyTorch has gradients of."""
    return {name: torch.tensor(np.asarray(leaf), requires_grad=True) for name, leaf in named_leaves(params).items()}


def linear(params, values):
    """`Linear` in numpy."""
    found = values @ np.asarray(params["weight"])
    return found + np.asarray(params["bias"]) if "bias" in params else found


def token_nll(logits, batch):
    """Of the words of the responses, in numpy; 0 at padding."""
    picked = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch.target)[..., None], axis=2)
    return -picked[..., 0] * np.asarray(batch.target_mask)


def rows_of(instances, tokenizer, *, emotional=(), emotions=None, picker=None, train=False, room=20, **settings):
    """Examples whose responses have 4 tokens at most."""
    known = np.zeros(tokenizer.vocab_size, bool)
    known[[tokenizer.token_id(word) for word in emotional]] = True
    shared = ClassicSettings(max_context_tokens=room, max_target_tokens=4, **settings)
    options = {"emotions": emotions, "picker": picker, "train": train}
    return ClassicExamples(instances, tokenizer, shared, known, **options)


def make_facts(rows: int) -> FactTexts:
    """A turn, a clause and no second one; a fact of the turn, two of the clause and no fourth; feelings of the turn."""
    rng = np.random.default_rng(2)
    found = {}
    for name, present in {"turns": (3, 2, 0), "feelings": (2, 1, 0), "tails": (2, 3, 1, 0)}.items():
        mask = np.broadcast_to(np.arange(3) < np.array(present)[:, None], (rows, len(present), 3))
        found[name] = jnp.asarray(rng.integers(4, VOCAB, mask.shape), jnp.int32)
        found[f"{name}_mask"] = jnp.asarray(mask)
    of, relation = (jnp.asarray([numbers] * rows, jnp.int32) for numbers in ([0, 1, 1, -1], [0, 3, 1, 0]))
    return FactTexts(**found, of=of, relation=relation)


def make_batch(rows: int = 3, source: int = 7, target: int = 5) -> ClassicBatch:
    rng = np.random.default_rng(0)
    lengths, ends = rng.integers(3, source + 1, rows), rng.integers(2, target + 1, rows)
    source_mask, target_mask = np.arange(source) < lengths[:, None], np.arange(target) < ends[:, None]
    ids = rng.integers(4, VOCAB, (rows, source))
    return ClassicBatch(
        jnp.asarray(np.where(source_mask, ids, PAD), jnp.int32), jnp.asarray(source_mask),
        jnp.asarray(rng.integers(4, VOCAB, (rows, target)), jnp.int32), jnp.asarray(target_mask),
        jnp.ones(rows, bool), emotion=jnp.asarray([0, 16, 30][:rows], jnp.int32),
        speaker=jnp.asarray(rng.integers(4, 6, (rows, source)), jnp.int32),
        emotional=jnp.asarray((ids % 3 == 0) & source_mask),
        facts=jnp.asarray(rng.integers(4, VOCAB, (rows, 5, 4)), jnp.int32),
        facts_mask=jnp.asarray(np.arange(4) < rng.integers(1, 5, (rows, 5, 1))),
        intensity=jnp.asarray(rng.uniform(size=(rows, source)) * source_mask, jnp.float32),
        concepts=ConceptWords(  # the last has no row's word
            jnp.asarray(rng.integers(4, VOCAB, (rows, 4)), jnp.int32), jnp.asarray([[True] * 3 + [False]] * rows),
            jnp.asarray([[1, 1, 2, -1]] * rows, jnp.int32), jnp.asarray(rng.uniform(size=(rows, 4)), jnp.float32),
        ),
        cognition=make_facts(rows),
    )  # fmt: skip


@functools.cache
def program(model: Classic, method: str, options: tuple[tuple[str, Any], ...]):
    """A method of a model, compiled once: (parameters, keys, arguments)."""
    named = dict(options)
    return jax.jit(lambda params, rngs, args: model.apply({"params": params}, *args, method=method, rngs=rngs, **named))


@dataclasses.dataclass(frozen=True)
class Made:
    """A task with random parameters, biases among them, and its batch."""

    settings: ClassicSettings
    task: ClassicTask
    params: dict
    batch: ClassicBatch

    @property
    def model(self) -> Classic:
        return self.task.model

    def apply(self, *args, params=None, method, rngs=None, **options):
        return program(self.model, method, tuple(options.items()))(params or self.params, rngs or {}, args)

    def read(self, batch=None, params=None):
        """As answers have it."""
        return self.apply(batch or self.batch, params=params, method="read", train=False)

    def logits(self, batch=None, params=None):
        """Of the batch's targets, likewise."""
        return self.apply(batch or self.batch, params=params, method="__call__")

    def nll(self, read, rows=3):
        """Per word of the first rows' responses, in numpy."""
        found = token_nll(self.apply(self.batch.target, read, train=False, method="decode"), self.batch)
        return found[:rows].sum() / self.batch.target_mask[:rows].sum()

    @functools.cached_property
    def loss(self):
        """(parameters, batch, key, train=) -> loss and metrics."""
        return jax.jit(
            lambda params, batch, rng, *, train: self.task.loss(params, {}, batch, rng, train=train),
            static_argnames="train",
        )


def make(form: str, **changes) -> Made:
    settings = ClassicSettings(**{**SMALL, **FORMS[form], **changes})
    model = Classic(settings.config(VOCAB, START), settings.reader_settings(), settings.adversary, settings.copies)
    decoder = Decoder(DecodeSettings(max_tokens=4), START, END, PAD)
    weights = dict.fromkeys(settings.losses, 0.5)
    task = ClassicTask(model, decoder, weights, label_smoothing=0.1, heads=("emotion",) if weights else ())
    batch = make_batch()
    shapes = jax.eval_shape(task.init, jax.random.key(0), batch)
    return Made(settings, task, random_like(shapes, seed=1), batch)
