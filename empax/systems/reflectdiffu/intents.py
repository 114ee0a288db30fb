"""Task "intents": what the listener is going to do, from the context alone.

The gold response is unknown where the first intent is wanted, so a classifier that reads it would leak it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from empax.core.cache import kept_array
from empax.core.config import ConfigError
from empax.core.files import hash_json
from empax.core.settings import cache_dir
from empax.core.shapes import shapes_of
from empax.core.sharding import local_mesh
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.tree import hash_tree
from empax.core.types import Batch, Instance, Mean, Metrics, Params
from empax.data.batches import SequenceExamples, draw
from empax.data.store import check_prepared, load_instances
from empax.data.tokenizers import SubwordTokenizer
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead
from empax.parts.generator.task import apply
from empax.retrieval.corpus import KEPT_FROM
from empax.retrieval.encode import BUCKETS, Encoder, embed
from empax.systems.reflectdiffu.examples import pieces_of
from empax.systems.reflectdiffu.labels import INTENTS, intent_ids, load_intents
from empax.systems.reflectdiffu.reasons import check_pieces_encoder, load_pieces_encoder
from empax.systems.reflectdiffu.settings import IntentTaskSettings, ReflectSettings
from empax.training.checkpoint import load_params

HEAD = ClassificationHead(num_classes=len(INTENTS))


@dataclasses.dataclass(frozen=True)
class Intents:
    """Cross-entropy of the intent; a target is its number."""

    encoder: DualEncoder

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, second = jax.random.split(rng)
        encoder = self.encoder.init(first, batch.source, batch.source_mask)["params"]
        return {"encoder": encoder, "head": HEAD.init(second, jnp.zeros((1, self.encoder.width)))["params"]}

    def logits(self, params: Params, source: Any, mask: Any, rng: jax.Array | None) -> Float[jax.Array, "B I"]:
        first, second = (None, None) if rng is None else jax.random.split(rng)
        encoding = apply(self.encoder, params["encoder"], source, mask, method="embed", rng=first)
        return apply(HEAD, params["head"], encoding, rng=second)

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        logits = self.logits(params, batch.source, batch.source_mask, rng if train else None)
        nll, hit = intent_losses(jax.nn.log_softmax(logits), batch.target[:, 0])
        return Mean.of(nll, batch.valid), {"accuracy": Mean.of(hit, batch.valid)}


def intent_losses(log_probs: Float[jax.Array, "B I"], intent: Any) -> tuple[jax.Array, jax.Array]:
    """Each row's negative log-likelihood of `intent` (any where it is -1), and 1 where that is the likeliest."""
    nll = -jnp.take_along_axis(log_probs, jnp.maximum(intent, 0)[:, None], axis=1)[:, 0]
    return nll, (log_probs.argmax(axis=1) == intent).astype(jnp.float32)


def check_intents(stage: IntentTaskSettings, run: RunContext) -> None:
    """Raises ConfigError or DataError if there are no labels, or no such encoder."""
    check_prepared(run)
    load_intents(run.plan.data)
    check_pieces_encoder(stage.encoder, run)
    most = run.shared_settings(ReflectSettings).max_piece_tokens
    if most > BUCKETS[-1]:
        raise ConfigError(f"{run.shared}.max_piece_tokens = {most} must be at most {BUCKETS[-1]} to classify contexts.")


def build_intents(stage: IntentTaskSettings, run: RunContext) -> Assembly:
    encoder = load_pieces_encoder(stage.encoder, run)
    labels, tokenizer = load_intents(run.plan.data), encoder.tokenizer
    assert isinstance(tokenizer, SubwordTokenizer)
    most = run.shared_settings(ReflectSettings).max_piece_tokens

    def examples(split: str, limit: int) -> SequenceExamples:
        instances = draw([i for i in load_instances(run, split) if i.id in labels], limit)
        rows = pieces_of(tokenizer, [i.context for i in instances], most)
        targets = [[int(number)] for number in intent_ids(labels[i.id] for i in instances)]
        return SequenceExamples([row.ids for row in rows], targets, pad_id=tokenizer.pad_id, max_target_tokens=1)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params}

    return Assembly(
        Intents(encoder.model),
        examples("train", 0),
        examples("validation", stage.max_validation_examples),
        initial=initial,
    )


def sketch_intents(stage: IntentTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    encoder = load_pieces_encoder(stage.encoder, run, with_params=False, planned=True)
    return Sketch(Intents(encoder.model), shapes_of(Batch, B=batch_size, S=length, T=1))


@functools.lru_cache(maxsize=8)
def _probabilities(task: Intents) -> Encoder:
    """One function per classifier, so that its compiled code is found again."""
    return lambda params, ids, mask: jax.nn.softmax(task.logits(params, ids, mask, None))


@dataclasses.dataclass(frozen=True)
class IntentGuesser:
    """A trained classifier that gives the distribution of intents after contexts."""

    task: Intents
    params: Params
    tokenizer: SubwordTokenizer
    max_tokens: int

    def __call__(self, instances: Sequence[Instance]) -> Float[np.ndarray, "N I"]:
        """Of the response to each; nothing of the response is read. Those of a whole split are kept across runs."""
        rows = pieces_of(self.tokenizer, [i.context for i in instances], self.max_tokens)
        ids = [row.ids for row in rows]

        def make() -> Float[np.ndarray, "N I"]:
            options = {"mesh": local_mesh(), "progress": "intents" if len(rows) > 1 else None}
            return embed(_probabilities(self.task), self.params, ids, pad_id=self.tokenizer.pad_id, **options)

        if len(rows) < KEPT_FROM:
            return make()
        key = hash_json([hash_tree(self.params), self.task.encoder.pooling, ids])
        return kept_array(cache_dir() / "intents" / f"{key}.npy", make)


def load_guesser(run: RunContext, stage: str) -> IntentGuesser:
    """The classifier of a finished stage."""
    settings = run.settings(stage, IntentTaskSettings)
    encoder = load_pieces_encoder(settings.encoder, run, with_params=False)
    assert isinstance(encoder.tokenizer, SubwordTokenizer)
    most = run.shared_settings(ReflectSettings).max_piece_tokens
    return IntentGuesser(Intents(encoder.model), load_params(run.files.stage(stage)), encoder.tokenizer, most)
