"""Readers that read graphs of words and concepts (KEMP)."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from empax.models.heads import masked_mean
from empax.models.layers import MASKED, normal
from empax.models.memory_attention import Memory
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig
from empax.systems.classic.concepts import ConceptsSettings
from empax.systems.classic.readers import ClassicBatch, ConceptWords, Linear, Read, Reader

_PADDING = 0.5  # intensity of a context's padding in KEMP's code


class GraphAttention(nn.Module):
    r"""Attention of nodes to their neighbours in a graph.

    .. math:: Norm(n_i + W_o \sum_{j \in N(i)} a_{ij} W_v n_j), \quad
              a_i = softmax_{j \in N(i)}((c\, W_q n_i + r_{ij}) \cdot (W_k n_j + s_{ij}))

    with r and s vectors of the kind of the edge from i to j, if edges have kinds, and c the inverse square root of the
    head's width. A node without edges reads zeros.
    Departure: KEMP has c = 1, by which nearly every new node reads a single neighbour, by chance.

    Attributes:
      num_heads: heads of D / num_heads features each. Source: one, KEMP; two, CASE.
      kinds: number of kinds of edges, which edges index from 1; 0 = edges are booleans. Source: CASE.
      published: c is 1, and the logits of absent edges are 0, so that such nodes keep a share. Source: KEMP's code.
    """

    config: TransformerConfig
    num_heads: int = 1
    kinds: int = 0
    published: bool = False

    @nn.compact
    def __call__(
        self, nodes: Float[Array, "B I D"], read: Float[Array, "B J D"], edges: Shaped[Array, "B I J"]
    ) -> Float[Array, "B I D"]:
        size, heads, there = self.config.d_model, self.num_heads, edges > 0
        width = max(size // heads, 1)

        def split(name: str, values: jax.Array) -> jax.Array:
            return Linear(heads * width, name=name)(values).reshape(*values.shape[:2], heads, width)

        query, key, value = split("query", nodes), split("key", read), split("value", read)
        query = query if self.published else query * width**-0.5
        logits = jnp.einsum("BIHN,BJHN->BHIJ", query, key)
        if self.kinds:
            asked, told = (
                self.param(name, normal(size**-0.5), (self.kinds, heads, width)) for name in ("asked", "told")
            )
            kind = jax.nn.one_hot(edges - 1, self.kinds)  # zeros where there is no edge
            logits += jnp.einsum("BIHR,BIJR->BHIJ", jnp.einsum("BIHN,RHN->BIHR", query, told), kind)
            logits += jnp.einsum("BJHR,BIJR->BHIJ", jnp.einsum("BJHN,RHN->BJHR", key, asked), kind)
            logits += jnp.einsum("RH,BIJR->BHIJ", jnp.einsum("RHN,RHN->RH", asked, told), kind)
        weights = jax.nn.softmax(jnp.where(there[:, None], logits, 0.0 if self.published else MASKED))
        if not self.published:
            weights = jnp.where(there[:, None], weights, 0.0)
        mixed = jnp.einsum("BHIJ,BJHN->BIHN", weights, value).reshape(*nodes.shape[:2], heads * width)
        return self.config.make_norm()(nodes.astype(jnp.float32) + Linear(size, name="out")(mixed))


def concept_edges(mask: Bool[Array, "B S"], concepts: ConceptWords) -> Bool[Array, "B S J"]:
    """Returns the edges from each word of a source to its words and then its concepts.

    A word reads the first token, the word before it and its concepts; the first token reads all. Source: KEMP's code.
    """
    place = jnp.arange(mask.shape[1])
    first = place == 0
    words = first[:, None] | first[None] | (place[:, None] - 1 == place[None])
    own = (place[None, :, None] == concepts.place[:, None]) | first[None, :, None]
    return jnp.concatenate([words[None] & mask[:, None], own & concepts.mask[:, None]], axis=-1)


def concept_nodes(
    batch: ClassicBatch, concepts: ConceptWords, words: EncoderDecoder, role: Float[Array, " D"]
) -> Float[Array, "B J D"]:
    """Returns the embeddings, times sqrt(D), of words with their speaker and of concepts with their role."""
    context = words.embed(batch.source) + words.embed(batch.speaker)
    nodes = jnp.concatenate([context, words.embed(concepts.ids) + role[None, None]], axis=1)
    return words.config.d_model**0.5 * nodes


class Concepts(Reader):
    r"""Words read their concepts before the encoder reads both; emotional intensity weighs the words for the emotion.

    .. math:: H = Enc([Graph(c); k]), \quad s = \sum_i softmax(\eta)_i h_i

    with \eta the intensity of each word's emotion. The emotion is read from s, the signal. Every decoder layer reads
    it too: W [a; s] of its attention a is W_1 a + W_2 s, where W_1 is merged with the attention's output matrix.
    Source: Li et al. 2022 (KEMP), released code. Departure: concepts follow the words without padding, which counts in
    neither graph nor signal, unless `published`; the graph has no dropout.
    """

    settings: ConceptsSettings
    losses: ClassVar[tuple[str, ...]] = ("attention",)

    def setup(self) -> None:
        if self.settings.most:
            self.graph = GraphAttention(self.config, published=self.settings.published)
            self.role = self.param("role", normal(self.config.initial_embedding_stddev()), (self.config.d_model,))

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        assert batch.intensity is not None
        s, source, mask, intensity = self.settings, batch.source, batch.source_mask, batch.intensity
        if s.published:
            intensity = jnp.where(mask, intensity, _PADDING)
        states = read.states
        if s.most:
            concepts = batch.concepts
            assert concepts is not None
            pairs = ((source, concepts.ids), (mask, concepts.mask), (intensity, concepts.intensity))
            joined = (*(jnp.concatenate(pair, axis=1) for pair in pairs), self._joined(batch, concepts, words))
            order = jnp.argsort(~joined[1], axis=1, stable=True)  # padding last
            source, mask, intensity, embedded = (jax.vmap(lambda row, at: row[at])(part, order) for part in joined)
            states = words.encode(None, mask, embedded=embedded, deterministic=not train)
        if not s.published:
            intensity = jnp.where(mask, intensity, MASKED)
        shares = jax.nn.softmax(intensity)
        signal = jnp.einsum("BS,BSD->BD", shares, states.astype(jnp.float32))
        memories = read.memories
        if s.signal:
            memory = Memory(signal[:, None].astype(states.dtype), jnp.ones((len(signal), 1), bool))
            memories = {**memories, "signal": memory}
        return read.replace(  # type: ignore[attr-defined]
            states=states, mask=mask, words=source, context=signal, intensity=shares, memories=memories
        )

    def _joined(self, batch: ClassicBatch, concepts: ConceptWords, words: EncoderDecoder) -> Float[Array, "B J D"]:
        """Returns the words after they have read their concepts, and the concepts, both unscaled."""
        nodes = concept_nodes(batch, concepts, words, self.role)
        length = batch.source.shape[1]
        context = self.graph(nodes[:, :length], nodes, concept_edges(batch.source_mask, concepts))
        return jnp.concatenate([context, nodes[:, length:]], axis=1) / self.config.d_model**0.5


def attention_loss(
    weights: Float[Array, "B T S"],
    target_mask: Bool[Array, "B T"],
    shares: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    r"""Returns the mean squared error between the decoder's attention and the intensities, and the rows that count.

    .. math:: \mathrm{mean}_s (\mathrm{mean}_t a_{ts} - softmax(\eta)_s)^2

    Source: Li et al. 2022 (KEMP), released code. Departure: that counts padding in both means.
    """
    attended = masked_mean(weights, target_mask)
    squares = jnp.where(mask, jnp.square(attended - shares), 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    return squares, target_mask.any(axis=1)
