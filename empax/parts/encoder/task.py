"""An encoder with heads on its vectors, as a task and as what answers once it is trained."""

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
from empax.models.heads import ClassificationHead
from empax.models.layers import apply
from empax.retrieval.encode import BUCKETS, KEPT_FROM, Encoder, embed


@dataclasses.dataclass(frozen=True)
class EncoderTask(abc.ABC):
    """What is learnt from the vectors of texts by heads on them.

    A task of a system says which `heads` there are, what it makes of their outputs (`said`) and what that should have
    been (`losses`); to be asked once it is trained, also its `rows`, and what is `predicted`.

    Parameters: "encoder" as DualEncoder has them, and each head's under its name.

    Attributes:
      progress: name of the progress bar of whoever asks, and how many texts have one.
      kept: folder of the cache for predictions of 1,000 texts or more; empty = they are made anew.
    """

    encoder: DualEncoder
    progress: ClassVar[tuple[str, int]] = ("texts", 2)
    kept: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def heads(self) -> Mapping[str, ClassificationHead]:
        """By the name of their parameters."""

    @abc.abstractmethod
    def said(self, *outputs: Float[Array, "N _"]) -> Any:
        """What the outputs of the heads mean."""

    @abc.abstractmethod
    def losses(self, found: Any, batch: Any, *, train: bool) -> tuple[Mean, Metrics]:
        """The loss of what is `said` of a batch's sources, and what to log."""

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        first, *rest = jax.random.split(rng, 1 + len(self.heads))
        params: Params = {"encoder": self.encoder.init(first, batch.source, batch.source_mask)["params"]}
        for (name, head), key in zip(self.heads.items(), rest, strict=True):
            params[name] = head.init(key, jnp.zeros((1, self.encoder.width)))["params"]
        return params

    def vectors(
        self, params: Params, ids: Any, mask: Bool[Array, "N S"], *, rng: jax.Array | None, **inputs: Any
    ) -> Float[Array, "N D"]:
        """What the heads look at; see `read`."""
        return apply(self.encoder, params["encoder"], ids, mask, method="embed", rng=rng, **inputs)

    def read(self, params: Params, ids: Any, mask: Bool[Array, "N S"], rng: jax.Array | None, **inputs: Any) -> Any:
        """What is `said` of texts, ids[N,S]; dropout where there is an `rng`.

        `inputs` may be `embedded`, [N,S,D], which stands for the embeddings of ids; those are then None.
        """
        first, second = (None, None) if rng is None else self.keys(rng)
        vectors = self.vectors(params, ids, mask, rng=first, **inputs)
        return self.said(*(apply(head, params[name], vectors, rng=second) for name, head in self.heads.items()))

    def keys(self, rng: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of dropout in the encoder, and in the heads."""
        return rng, rng

    def loss(
        self, params: Params, frozen: Params, batch: AnyBatch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        found = self.read(params, batch.source, batch.source_mask, rng if train else None)
        return self.losses(found, batch, train=train)

    def rows(self, tokenizer: Tokenizer, max_tokens: int, *given: Any) -> Sequence[Sequence[int]]:
        """The ids of each text that is asked about."""
        raise NotImplementedError

    def predicted(self, found: Any) -> Float[Array, "N ..."]:
        """What whoever asks gets of what is `said`."""
        return found


@functools.lru_cache(maxsize=8)
def _predictions(task: EncoderTask) -> Encoder:
    """One function per task, so that its compiled code is found again."""
    return lambda params, ids, mask: task.predicted(task.read(params, ids, mask, None))


T = TypeVar("T", bound=EncoderTask)


@dataclasses.dataclass(frozen=True)
class Predictor(Generic[T]):
    """A trained task, ready to be asked about texts.

    Attributes:
      max_tokens: the most that a text may have with its frame.
      hash: of parameters and settings, for whoever keeps what it says.
      buckets: lengths in tokens to pad to; one alone compiles once, for whoever asks about single texts.
    """

    task: T
    params: Params
    tokenizer: Tokenizer
    max_tokens: int
    hash: str = ""
    buckets: tuple[int, ...] = BUCKETS

    def __call__(self, *given: Any) -> Float[np.ndarray, "N ..."]:
        """What the task's `predicted` says of each text that its `rows` makes of what is `given`."""
        rows = self.task.rows(self.tokenizer, self.max_tokens, *given)
        name, least = self.task.progress

        def make() -> Float[np.ndarray, "N ..."]:
            options = {"buckets": self.buckets, "mesh": local_mesh(), "progress": name if len(rows) >= least else None}
            return embed(_predictions(self.task), self.params, rows, pad_id=self.tokenizer.pad_id, **options)

        if not self.task.kept or len(rows) < KEPT_FROM:
            return make()
        key = hash_json([hash_tree(self.params), self.task.encoder.pooling, rows])
        return kept_array(cache_dir() / self.task.kept / f"{key}.npy", make)
