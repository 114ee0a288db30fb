"""EmpRL's empathy identifiers: how strongly a response shows each communication mechanism, given its context."""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from empax.core.types import LEVELS
from empax.models.heads import ClassificationHead, masked_max, masked_mean
from empax.models.layers import Attention, Dropout

_POOLINGS = {"mean": masked_mean, "max": masked_max}


class ContextReader(nn.Module):
    """Classifier for one mechanism: the response attends to the context, is pooled and classified.

    .. math:: l = head(pool(R + Attention(R, C, C)))

    The attention has one head, biased projections and no norm. Source: EmpRL, Sec. III-D and Fig. 3; the paper has
    "max" and "linear", the code "mean" and "mlp" (Linear D -> D/2, tanh, dropout, Linear -> 3).

    Departure: dropout is also applied between pooling and head, since a mean over tokens averages out what was dropped.

    Attributes:
      pooling: pooling over the real tokens of the response.
      head: "mlp" or "linear".
      dropout: rate for the attention weights, for the attention's sum with the response, and in the head.
      dtype: type of the attention; pooling and head are float32.
    """

    pooling: Literal["mean", "max"] = "mean"
    head: Literal["mlp", "linear"] = "mlp"
    dropout: float = 0.1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        response: Float[Array, "B T D"],
        response_mask: Bool[Array, "B T"],
        context: Float[Array, "B S D"],
        context_mask: Bool[Array, "B S"],
        *,
        deterministic: bool,
    ) -> Float[Array, "B 3"]:
        """Returns the logits of the three levels, float32."""
        size = response.shape[-1]
        attention = Attention(
            d_model=size,
            num_heads=1,
            head_dim=size,
            use_bias=True,
            scale=True,
            dropout=self.dropout,
            init_scale=3**-0.5,  # the variance of PyTorch's Linear: at first the context has little weight
            dtype=self.dtype,
            name="attention",
        )
        mask = context_mask[:, None, :]
        states = response + attention(response, context, mask=mask, bias=None, deterministic=deterministic)
        states = Dropout(self.dropout)(states, deterministic=deterministic)
        pooled = _POOLINGS[self.pooling](states, response_mask)
        hidden = size // 2 if self.head == "mlp" else None
        classify = ClassificationHead(num_classes=len(LEVELS), hidden=hidden, dropout=self.dropout, name="head")
        return classify(pooled, deterministic=deterministic)


class EmpathyIdentifier(nn.Module):
    """Two encoders with a `ContextReader` for each mechanism on top.

    Parameters: "context_encoder", "response_encoder", and one entry named after each mechanism. With one mechanism this
    is one identifier of the paper; several mechanisms share the encoders.

    Attributes:
      context_encoder, response_encoder: `(ids[B,S], mask[B,S], deterministic=) -> states[B,S,D]` (BertEncoder,
        T5Encoder); two modules, not one under two names.
      mechanisms: names of the mechanisms, in the order of the logits.
      pooling, head, dropout, dtype: see ContextReader.
    """

    context_encoder: nn.Module
    response_encoder: nn.Module
    mechanisms: tuple[str, ...]
    pooling: Literal["mean", "max"] = "mean"
    head: Literal["mlp", "linear"] = "mlp"
    dropout: float = 0.1
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        context: Int[Array, "B S"],
        context_mask: Bool[Array, "B S"],
        response: Int[Array, "B T"],
        response_mask: Bool[Array, "B T"],
        *,
        deterministic: bool = True,
    ) -> Float[Array, "B C 3"]:
        """Returns three logits per mechanism. Rows of padding alone give meaningless numbers, never NaN."""
        contexts = self.context_encoder(context, context_mask, deterministic=deterministic)
        responses = self.response_encoder(response, response_mask, deterministic=deterministic)
        readers = [
            ContextReader(self.pooling, self.head, self.dropout, self.dtype, name=name) for name in self.mechanisms
        ]
        logits = [
            read(responses, response_mask, contexts, context_mask, deterministic=deterministic) for read in readers
        ]
        return jnp.stack(logits, axis=1)
