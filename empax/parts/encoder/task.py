"""An encoder with heads on its vectors: the task, and the predictor of a trained task."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.protocols import Tokenizer
from empax.core.settings import cache_dir
from empax.core.sharding import local_mesh
from empax.core.tree import hash_tree
from empax.core.types import AnyBatch, Batch, Mean, Metrics, Params
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead, unit_variance
from empax.models.layers import apply
from empax.retrieval.encode import BUCKETS, KEPT_FROM, Encoder, embed


@dataclasses.dataclass(frozen=True)
class EncoderTask(abc.ABC):
    """Base of tasks with heads on the vectors of texts.

    A subclass defines its `heads`, their interpretation (`said`) and the `losses`; for predictions, also the `rows` of
    its inputs and the `predicted` values.

    Parameters: "encoder" as in DualEncoder, and each head's under its name.

    Attributes:
      progress: name of the progress bar of predictions, and the number of texts from which it is shown.
      kept: folder of the cache for predictions of 1,000 texts or more; empty = no cache.
    """

    encoder: DualEncoder
    progress: ClassVar[tuple[str, int]] = ("texts", 2)
    kept: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def heads(self) -> Mapping[str, ClassificationHead]:
        """The heads, by the name of their parameters."""

    @abc.abstractmethod
    def said(self, *outputs: Float[Array, "N _"]) -> Any:
        """Interprets the outputs of the heads."""

    @abc.abstractmethod
    def losses(self, found: Any, batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        """Returns the loss of what is `said` of a batch's sources, and metrics."""

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, *rest = jax.random.split(rng, 1 + len(self.heads))
        params: Params = {"encoder": self.encoder.init(first, batch.source, batch.source_mask)["params"]}
        for (name, head), key in zip(self.heads.items(), rest, strict=True):
            params[name] = head.init(key, jnp.zeros((1, self.encoder.width)))["params"]
        return params

    def vectors(
        self, params: Params, ids: Any, mask: Bool[Array, "N S"], *, rng: jax.Array | None, **inputs: Any
    ) -> Float[Array, "N D"]:
        """Returns the inputs of the heads, before they are scaled; see `read`."""
        return apply(self.encoder, params["encoder"], ids, mask, rng=rng, **inputs)

    def read(self, params: Params, ids: Any, mask: Bool[Array, "N S"], rng: jax.Array | None, **inputs: Any) -> Any:
        """Returns what is `said` of texts, ids[N,S]; an `rng` turns on dropout.

        Heads read the vectors at unit variance. On the small states of a T5, or on unit vectors, new heads would learn
        slowly.

        `inputs` may be `embedded`, [N,S,D], which replaces the embeddings of ids; `ids` is then None.
        """
        first, second = (None, None) if rng is None else self.keys(rng)
        vectors = unit_variance(self.vectors(params, ids, mask, rng=first, **inputs))
        return self.said(*(apply(head, params[name], vectors, rng=second) for name, head in self.heads.items()))

    def keys(self, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the dropout keys of the encoder and of the heads."""
        return rng, rng

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        found = self.read(params, batch.source, batch.source_mask, rng if train else None)
        return self.losses(found, batch, train=train)

    def rows(self, tokenizer: Tokenizer, max_tokens: int, *given: Any) -> Sequence[Sequence[int]]:
        """Returns the ids of each text to predict."""
        raise NotImplementedError

    def predicted(self, found: Any) -> Float[Array, "N ..."]:
        """Returns the predictions from what is `said`."""
        return found


@functools.lru_cache(maxsize=8)
def _predictions(task: EncoderTask) -> Encoder:
    """Returns one function per task, so that its compiled code is reused."""
    return lambda params, ids, mask: task.predicted(task.read(params, ids, mask, None))


T = TypeVar("T", bound=EncoderTask)


@dataclasses.dataclass(frozen=True)
class Predictor(Generic[T]):
    """A trained task, ready for predictions.

    Attributes:
      max_tokens: maximum tokens of a text with its frame.
      hash: hash of parameters and settings, for caches of predictions.
      buckets: lengths in tokens to pad to; a single one compiles once, for single texts.
    """

    task: T
    params: Params
    tokenizer: Tokenizer
    max_tokens: int
    hash: str = ""
    buckets: tuple[int, ...] = BUCKETS

    def __call__(self, *given: Any) -> Float[np.ndarray, "N ..."]:
        """Returns the task's `predicted` values for each text of its `rows` of `given`."""
        rows = self.task.rows(self.tokenizer, self.max_tokens, *given)
        name, least = self.task.progress

        def make() -> Float[np.ndarray, "N ..."]:
            options = {"buckets": self.buckets, "mesh": local_mesh(), "progress": name if len(rows) >= least else None}
            return embed(_predictions(self.task), self.params, rows, pad_id=self.tokenizer.pad_id, **options)

        if not self.task.kept or len(rows) < KEPT_FROM:
            return make()
        key = hash_json([hash_tree(self.params), self.task.encoder.pooling, rows])
        return kept_array(cache_dir() / self.task.kept / f"{key}.npy", make)
