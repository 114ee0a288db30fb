"""Embeds texts as unit vectors, cached across runs, to compare turns with events and facts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from empax.core.cache import kept_array
from empax.core.files import hash_json
from empax.core.protocols import Tokenizer
from empax.core.settings import cache_dir
from empax.core.sharding import local_mesh
from empax.core.tree import hash_tree
from empax.core.types import Params
from empax.data import features
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.models.dual_encoder import DualEncoder, Towers, random_params
from empax.retrieval.encode import BUCKETS, KEPT_FROM, embed, embedders

_MAX_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """An encoder of short texts; longer ones keep their end."""

    model: DualEncoder
    params: Params
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: EncoderSettings, tokenizer: Tokenizer | None, seed: int) -> TextEncoder:
        """Loads the encoder of `settings`; a random one uses `tokenizer`, and is drawn with `seed`."""
        loaded = load_encoder(settings, tokenizer)
        params = loaded.params
        if params is None:
            params = random_params(loaded.model.init, jax.random.key(seed))["params"]
        return cls(loaded.model, params, loaded.tokenizer)

    @functools.cached_property
    def hash(self) -> str:
        """A hash of everything that changes a vector."""
        read = self.tokenizer.hash if isinstance(self.tokenizer, SubwordTokenizer) else ""
        return hash_json([hash_tree(self.params), repr(self.model), read, _MAX_TOKENS])

    def __call__(self, texts: Sequence[str], *, progress: str | None = None) -> Float[np.ndarray, "N D"]:
        """Returns a unit vector for each text; equal texts are encoded once."""
        unique = list(dict.fromkeys(texts))
        ids = features.encode_for_bert(self.tokenizer, unique, _MAX_TOKENS)

        def make() -> Float[np.ndarray, "N D"]:
            return self._embed(ids, buckets=BUCKETS, mesh=local_mesh(), progress=progress)

        path = cache_dir() / "embeddings" / f"{hash_json([self.hash, 'unit', ids])}.npy"
        vectors = make() if len(unique) < KEPT_FROM else kept_array(path, make)
        places = {text: place for place, text in enumerate(unique)}
        return vectors[[places[text] for text in texts]]

    def few(self, texts: Sequence[str], *, lengths: Sequence[int], rows: int = 1) -> Float[np.ndarray, "N D"]:
        """Embeds a few texts in batches of `rows`, each padded to the shortest of `lengths` that fits it.

        Each length compiles one small program. A text longer than all of them keeps its end.
        """
        ids = features.encode_for_bert(self.tokenizer, texts, max(lengths))
        vectors = np.empty((len(ids), self.model.width), np.float32)
        padded = np.array([min(n for n in lengths if n >= len(row)) for row in ids], int)
        for length in sorted(set(padded.tolist())):
            (places,) = np.nonzero(padded == length)
            some = [ids[place] for place in places]
            some += some[:1] * (-len(some) % rows)
            vectors[places] = self._embed(some, buckets=(length,), tokens_per_batch=rows * length)[: len(places)]
        return vectors

    def _embed(self, ids: Sequence[Sequence[int]], **options: Any) -> Float[np.ndarray, "N D"]:
        apply = embedders(Towers(self.model))[0]
        found = embed(apply, {"encoder": self.params}, ids, pad_id=self.tokenizer.pad_id, **options)
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
