"""NEC: commonsense in encoder and decoder, and responses ranked by contrast (Huangfu et al. 2025).

The encoder reads the context followed by facts about things (Eq. 3). A second encoder, which shares the embeddings,
makes a vector of each fact about people, and every decoder layer attends to these vectors through a gate (Eq. 8). The
loss is the likelihood; a later stage adds a margin loss over the ranks of candidate responses (Eq. 9 to 12).

Letters in addition to those of `core.types`: M facts, F tokens of a fact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from empax.core.types import Mean, Params
from empax.models.heads import masked_mean, unit_variance
from empax.models.layers import apply
from empax.models.memory_attention import Memory
from empax.parts.generator.contrast import Candidates, Read, draw_projection, gather, in_batch
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Keys, ResponseTask
from empax.systems.nec.settings import SOCIAL, CandidateSettings


@dataclasses.dataclass(frozen=True)
class Nec(ResponseTask):
    """Generates a response from context and facts, by likelihood (Eq. 10). NEC has no emotion head, by design.

    Attributes:
      model: its config names the memory SOCIAL if `social` is set.
      social: whether the model attends to facts about people.
    """

    social: bool
    projection: ClassVar[str] = "projection"

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        width = self.model.config.d_model
        rows = batch.source.shape[0]
        memories = {SOCIAL: Memory(jnp.zeros((rows, 1, width)), jnp.ones((rows, 1), bool))} if self.social else None
        source = batch.source, batch.source_mask, batch.target
        params: dict[str, Any] = {"model": self.model.init(first, *source, memories=memories)["params"]}
        if self.social:
            drawn = self.model.init(second, *source, memories=memories)["params"]
            params["social"] = {name: leaf for name, leaf in drawn.items() if name == "encoder"}
        return params

    def encode(self, params: Params, batch: Any, rng: jax.Array | None) -> Read:
        """Encodes source and facts; an `rng` turns on dropout."""
        first, second = (None, None) if rng is None else jax.random.split(rng)
        source = super().encode(params, batch, first)
        if not self.social:
            return source
        rows, facts, width = batch.facts.shape
        flat, mask = batch.facts.reshape(-1, width), batch.facts_mask.reshape(-1, width)
        # Its own layers on the model's embeddings, one table for both.
        own = {**params["model"], **params["social"]}
        read = apply(self.model, own, flat, mask, method="encode", rng=second)
        # Departure: the code takes the state at position 0, a summary at BART's start token. Other models have none
        # there.
        # At unit variance: the attention to facts is new, and the states of a T5's encoder are too small for it.
        vectors = unit_variance(masked_mean(read, mask)).astype(source.states.dtype).reshape(rows, facts, -1)
        memory = Memory(vectors, batch.facts_mask.any(axis=2))
        return dataclasses.replace(source, beside={"memories": {SOCIAL: memory}})


@dataclasses.dataclass(frozen=True)
class Contrastive(Nec):
    """NEC with likelihood and contrast together (Eq. 9); answers are the beams nearest to the context (Eq. 13 to 15).

    Attributes:
      contrast: the candidates and the margin per rank.
      explorer: decoder of the current model's own candidates; None = no such candidates.
    """

    contrast: CandidateSettings = dataclasses.field(default_factory=CandidateSettings, kw_only=True)
    explorer: Decoder | None = None

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        return {**super().init(first, batch), self.projection: draw_projection(second, self.model.config.d_model)}

    def explore(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Any:
        """Adds the current model's beams to the candidates of the batch."""
        if self.explorer is None:
            return batch
        found = self.search(self.explorer, params, batch, self.encode(params, batch, None), rng).tokens
        made = self.explorer.made(found)
        mask = jnp.arange(found.shape[2])[None, None] <= made.sum(axis=2, keepdims=True)  # the end token too
        return batch.replace(own=found, own_mask=mask)

    def contrasted(self, params: Params, batch: Any, read: Read, rngs: Keys) -> Mean:
        """Returns L_CL (Eq. 11 and 12) over all pairs of candidates of a row."""
        found = self.candidates(batch)
        return self.ranking(params).ranked(batch, read, found, rngs[1])

    def candidates(self, batch: Any) -> Candidates:
        """Gathers the candidates of all kinds; see `parts.generator.contrast.gather`."""
        groups = [(getattr(batch, name), getattr(batch, f"{name}_mask")) for name in ("own", "frequent", "different")]
        groups = [(ids, mask) for ids, mask in groups if ids is not None]
        if self.contrast.in_batch:
            groups.append(in_batch(batch))
        return gather(batch, groups, self.model.config.start_id, self.contrast.max_candidates)
