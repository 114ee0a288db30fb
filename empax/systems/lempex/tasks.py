"""LEMPEx: empathetic generation guided by exemplars and by judges of empathy (Majumder et al.).

A T5 reads the context with its speakers; one vector of the retrieved responses is fused into every state (Eq. 4 to 6);
four losses come from judges of the response (Alg. 4). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from empax.core.types import Params
from empax.models.arithmetic import rows_of
from empax.models.layers import apply
from empax.models.transformer_config import TransformerConfig
from empax.parts.generator.contrast import Read, draw_projection
from empax.parts.generator.task import Keys, Losses, ResponseTask
from empax.systems.lempex.examples import LISTENER, NOBODY
from empax.systems.lempex.exemplar_fusion import ExemplarFusion
from empax.systems.lempex.losses import EmpathyLosses


def draw_speakers(rng: jax.Array, config: TransformerConfig) -> Float[Array, "3 D"]:
    """Draws the speaker embeddings as large as those of words; that of frame and padding is zero.

    From zero, an optimizer whose steps are relative to a parameter's size (Adafactor) would hardly move them.
    """
    drawn = config.initial_embedding_stddev() * jax.random.normal(rng, (LISTENER + 1, config.d_model))
    return drawn.at[NOBODY].set(0.0)


@dataclasses.dataclass(frozen=True)
class LempexGenerator(ResponseTask):
    """Generates a response from context and exemplars.

    Parameters: "model"; "fusion" with exemplars; "speakers" if embeddings of the context include the speaker; "judges"
    if they are trained, else frozen under that name; "head" of Eq. 10. Without `empathy`, the likelihood is alone.
    """

    fusion: ExemplarFusion | None = None
    speakers: bool = True
    empathy: EmpathyLosses | None = None

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        params, size = super().init(first, batch), self.model.config.d_model
        if self.speakers:
            params["speakers"] = draw_speakers(jax.random.fold_in(second, 2), self.model.config)
        if self.fusion is not None:
            states = jnp.zeros((*batch.source.shape, size))
            exemplars = batch.exemplar, batch.exemplar_mask
            params["fusion"] = self.fusion.init(jax.random.fold_in(second, 0), states, *exemplars)["params"]
        if self.empathy is not None:
            params |= self.empathy.init(jax.random.fold_in(second, 1), batch, size)
        if self.contrast is not None:
            params[self.projection] = draw_projection(jax.random.fold_in(second, 3), size)
        return params

    def encode(self, params: Params, batch: Any, rng: jax.Array | None) -> Read:
        """Returns the states that the decoder attends to: Z, or the fused Z (Eq. 1 and 6)."""
        added = rows_of(params["speakers"], batch.speaker) if self.speakers else None
        source = batch.source, batch.source_mask
        states = apply(self.model, params["model"], *source, added=added, method="encode", rng=rng)
        if self.fusion is not None:
            own = None if rng is None else jax.random.fold_in(rng, 1)
            states = apply(self.fusion, params["fusion"], states, batch.exemplar, batch.exemplar_mask, rng=own)
        return Read(states, batch.source_mask)

    def losses(self, params: Params, frozen: Params, batch: Any, read: Read, rngs: Keys) -> Losses:
        hidden = self._hidden(params, batch.target, read, rngs[0])
        parts, metrics = self.ranked(params, batch, read, rngs)
        if self.empathy is None:
            nll, _ = self.likelihood_of(params, batch, hidden)
            return [(1.0, nll), *parts], {"nll": nll, **metrics}
        logits: Any = self.model.apply({"params": params["model"]}, hidden, method="logits_from")
        nll, _ = self.likelihood(logits, batch)
        parts = [(self.empathy.settings.weights.generation, nll), *parts]
        if batch.levels is not None:
            judges = params.get("judges", frozen.get("judges", {}))
            more, told = self.empathy(judges, params.get("head", {}), batch, hidden, logits, rngs[1])
            parts, metrics = [*parts, *more], {**metrics, **told}
        return parts, {"nll": nll, **metrics}

    def labels(self, params: Params, batch: Any, read: Read) -> dict[str, Array]:
        """Returns `nll_of_other_exemplars`, if the batch has them."""
        if batch.other is None:
            return {}
        other = batch.replace(exemplar=batch.other, exemplar_mask=batch.other_mask)
        return {"nll_of_other_exemplars": self.nll(params, batch, self.encode(params, other, None))["nll"]}
