"""LEMPEx: empathetic generation guided by exemplars and by judges of empathy (Majumder et al.).

A T5 reads the context with its speakers; one vector of retrieved responses stands beside every state (Eq. 4 to 6); four
losses ask what judges would say of the response (Alg. 4). PAPERS.md lists every equation and every departure.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from empax.core.types import Generated, Mean, Metrics, Params
from empax.losses.cross_entropy import cross_entropy
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.contrast import Contrast, Read
from empax.parts.generator.settings import ContrastSettings
from empax.parts.generator.task import Decoder, apply, combine, parted_nll, row_nll, target_weights
from empax.systems.lempex.examples import LISTENER
from empax.systems.lempex.exemplar_fusion import ExemplarFusion
from empax.systems.lempex.losses import EmpathyLosses


@dataclasses.dataclass(frozen=True)
class LempexGenerator:
    """Context and exemplars in, response out.

    Parameters: "model"; "fusion" and "speakers" where there are exemplars and speakers; "judges" where they are
    trained, else they are frozen under that name; "heads" of Eq. 10.

    Attributes:
      fusion: None = no exemplars.
      speakers: whether the context's embeddings tell who speaks.
      empathy: None = the likelihood alone.
      contrast: see `dialogue.generator.Generator`.
    """

    model: EncoderDecoder
    decoder: Decoder
    fusion: ExemplarFusion | None = None
    speakers: bool = True
    empathy: EmpathyLosses | None = None
    contrast: ContrastSettings | None = None
    heads: ClassVar[tuple[str, ...]] = ()

    @property
    def splits_batches(self) -> bool:
        """Not where the responses of a batch are each other's candidates."""
        return self.contrast is None

    def init(self, rng: jax.Array, batch: Any) -> Params:
        first, second = jax.random.split(rng)
        params: Params = {"model": self.model.init(first, batch.source, batch.source_mask, batch.target)["params"]}
        size = self.model.config.d_model
        if self.speakers:
            # From zeros, so that a pretrained model begins as it is.
            params["speakers"] = jnp.zeros((LISTENER + 1, size))
        if self.fusion is not None:
            states = jnp.zeros((*batch.source.shape, size))
            exemplars = batch.exemplar, batch.exemplar_mask
            params["fusion"] = self.fusion.init(jax.random.fold_in(second, 0), states, *exemplars)["params"]
        if self.empathy is not None and self.empathy.settings.losses == "first_state":
            params["heads"] = self.empathy.init_heads(jax.random.fold_in(second, 1), size)
        if self.empathy is not None and self.empathy.trains_judges:
            params["judges"] = self.empathy.init_judges(jax.random.fold_in(second, 2), batch)
        if self.contrast is not None:
            params["contrast"] = Contrast(self.contrast, self.model).init(jax.random.fold_in(second, 3))
        return params

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        first, second, third = jax.random.split(rng, 3) if train else (None,) * 3
        model, mask = params["model"], batch.target_mask & batch.valid[:, None]
        states = self.states(params, batch, batch.exemplar, batch.exemplar_mask, first)
        read = batch.target, states, batch.source_mask
        hidden = apply(self.model, model, *read, method="decode_hidden", rng=second)
        logits: Any = self.model.apply({"params": model}, hidden, method="logits_from")
        nll = cross_entropy(logits, batch.target, mask)
        metrics: Metrics = {"nll": nll}
        parts = [(1.0 if self.empathy is None else self.empathy.settings.weights.generation, nll)]
        if self.contrast is not None:
            contrast, source = Contrast(self.contrast, self.model), Read(states, batch.source_mask)
            metrics["contrast"] = contrast.loss(model, params["contrast"], batch, source, second)
            parts.append(contrast.part(metrics["contrast"], target_weights(batch), batch.valid))
        if self.empathy is not None and batch.levels is not None:
            judges = params.get("judges", frozen.get("judges", {}))
            more, told = self.empathy(judges, params.get("heads", {}), batch, hidden, logits, third)
            parts, metrics = [*parts, *more], {**metrics, **told}
        return combine(parts, target_weights(batch), batch.valid), metrics

    def states(
        self, params: Params, batch: Any, exemplars: Any, exemplar_mask: Any, rng: jax.Array | None
    ) -> Float[Array, "B S D"]:
        """What the decoder attends to: Z, or Z fused (Eq. 1 and 6)."""
        added = params["speakers"][batch.speaker] if self.speakers else None
        source = batch.source, batch.source_mask
        states = apply(self.model, params["model"], *source, added=added, method="encode", rng=rng)
        if self.fusion is None:
            return states
        own = None if rng is None else jax.random.fold_in(rng, 1)
        return apply(self.fusion, params["fusion"], states, exemplars, exemplar_mask, rng=own)

    def generate(self, params: Params, frozen: Params, batch: Any, rng: jax.Array) -> Generated:
        states = self.states(params, batch, batch.exemplar, batch.exemplar_mask, None)
        source = (batch.source, batch.source_mask) if self.decoder.settings.reads_source else None
        model, compared = params["model"], None
        if self.contrast is not None:
            contrast = Contrast(self.contrast, self.model)
            compared = contrast.compared(model, params["contrast"], Read(states, batch.source_mask))
        read = self.model, model, states, batch.source_mask, rng
        return self.decoder.from_states(*read, source=source, compared=compared)

    def read(self, params: Params, batch: Any) -> dict[str, Array]:
        """For each row `nll` and `num_tokens`; and `nll_of_other_exemplars` where the batch has those."""
        nll, num_tokens = self._nll(params, batch, batch.exemplar, batch.exemplar_mask)
        found = {"nll": nll, "num_tokens": num_tokens}
        if batch.other is not None:
            found["nll_of_other_exemplars"], _ = self._nll(params, batch, batch.other, batch.other_mask)
        return found

    def weigh(self, params: Params, batch: Any) -> dict[str, Array]:
        """`parted_nll` of each row."""
        states = self.states(params, batch, batch.exemplar, batch.exemplar_mask, None)
        return parted_nll(self.model, params["model"], batch, states, batch.source_mask)

    def _nll(
        self, params: Params, batch: Any, exemplars: Any, mask: Bool[Array, "B K P"] | None
    ) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        states = self.states(params, batch, exemplars, mask, None)
        return row_nll(self.model, params["model"], batch, states, batch.source_mask)
