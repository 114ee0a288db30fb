"""CASE's reader: two aligned graphs, of what follows from a context and of the feelings it evokes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import check_numbers
from empax.core.types import EMOTIONS
from empax.models.heads import masked_mean
from empax.models.layers import MASKED, gelu, normal
from empax.models.memory_attention import Memory
from empax.models.stack import Stack
from empax.models.transformer import EncoderDecoder
from empax.models.transformer_config import TransformerConfig
from empax.systems.classic.graphs import GraphAttention, concept_edges, concept_nodes
from empax.systems.classic.mimicry import RefinedContext
from empax.systems.classic.readers import (
    COGNITION,
    ClassicBatch,
    ConceptWords,
    FactTexts,
    Linear,
    Read,
    Reader,
    encode_texts,
    next_rows,
)

_HEADS = 2  # of a graph
_SELF, _CONTAINS, _BESIDE = 1, 2, 3
KINDS = _BESIDE + len(COGNITION)
"""Number of kinds of edges: a node to itself, turn and clause, two clauses, and each relation of a fact."""


@dataclasses.dataclass(frozen=True)
class AlignmentSettings:
    """Settings of the reader "alignment".

    Attributes:
      clauses: maximum clauses of the last turn.
      facts: maximum facts of the turn and its clauses; the best-ranked are kept.
      tokens: maximum tokens of the turn, of a clause, or of the feelings of one.
      tail_tokens: maximum tokens of a fact, including its first token; 97% of ATOMIC's fit.
      published: follows the released code: a difference of probabilities goes through another sigmoid, products of
        vectors and choices are not scaled, and a norm removes the intensities.
    """

    clauses: int = 4
    facts: int = 40
    tokens: int = 16
    tail_tokens: int = 8
    published: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "clauses", least=0)
        check_numbers(self, "facts", least=1)
        check_numbers(self, "tokens", "tail_tokens", least=2)


def fact_edges(facts: FactTexts) -> Int[Array, "B J J"]:
    """Returns the kinds of the edges between turns, clauses and facts; 0 = no edge. Every edge goes both ways."""
    real, known = facts.turns_mask.any(axis=-1), facts.tails_mask.any(axis=-1)
    first = jnp.arange(real.shape[1]) == 0
    turns = jnp.where(first[:, None] | first[None], _CONTAINS, _BESIDE)
    turns = jnp.where(real[:, :, None] & real[:, None], turns[None], 0)
    own = (facts.of[:, None] == jnp.arange(real.shape[1])[None, :, None]) & real[:, :, None] & known[:, None]
    about = jnp.where(own, _BESIDE + 1 + facts.relation[:, None], 0)
    apart = jnp.zeros((*known.shape, known.shape[1]), about.dtype)
    upper = jnp.concatenate([turns, about], axis=2)
    lower = jnp.concatenate([jnp.swapaxes(about, 1, 2), apart], axis=2)
    edges = jnp.concatenate([upper, lower], axis=1)
    there = jnp.concatenate([real, known], axis=1)
    return jnp.where(jnp.eye(edges.shape[1], dtype=bool)[None] & there[:, None], _SELF, edges)


class GraphLayer(nn.Module):
    """Graph attention and a feed-forward layer, each with a residual connection and a norm."""

    config: TransformerConfig
    kinds: int = 0

    @nn.compact
    def __call__(self, nodes: Float[Array, "B J D"], edges: Int[Array, "B J J"]) -> Float[Array, "B J D"]:
        size = self.config.d_model
        states = GraphAttention(self.config, _HEADS, self.kinds, name="attention")(nodes, nodes, edges)
        fed = Linear(size, name="feed_out")(gelu(Linear(size, name="feed_in")(states)))
        return self.config.make_norm()(states + fed)


def chosen(
    query: Float[Array, "B D"], memory: Float[Array, "B J D"], mask: Bool[Array, "B J"], *, published: bool
) -> tuple[Float[Array, "B D"], Float[Array, "B J"]]:
    r"""Returns the attention-weighted mean of tanh(memory), and the weights; zeros if a row has no memory.

    Departure: unless `published`, logits are divided by \sqrt D: else one node gets nearly all weight, by chance.
    """
    memory, scale = jnp.tanh(memory), 1.0 if published else query.shape[-1] ** -0.5
    logits = jnp.where(mask, scale * jnp.einsum("BD,BJD->BJ", query, memory), MASKED)
    shares = jnp.where(mask, jax.nn.softmax(logits), 0.0)
    return jnp.einsum("BJ,BJD->BD", shares, memory), shares


def mean_divergence(
    posterior: Float[Array, "B J"], prior: Float[Array, "B J"], mask: Bool[Array, "B J"]
) -> Float[Array, " B"]:
    r"""Returns KL(posterior || prior) divided by the number of nodes; no gradient flows to the posterior.

    Departure: the released code divides by the padded number of nodes.
    """
    posterior = jax.lax.stop_gradient(posterior)
    terms = posterior * (jnp.log(posterior + 1e-20) - jnp.log(prior + 1e-20))
    return jnp.where(mask, terms, 0.0).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)


def nearness(
    first: Float[Array, "*B D"],
    second: Float[Array, "*B D"],
    giver: Int[Array, " B"],
    *,
    published: bool,
) -> Float[Array, "*B"]:
    r"""Returns a contrastive loss: a pair must be nearer than with either side replaced by another row's.

    .. math:: -\log \sigma(f(a, b) - f(a, b')) - \log \sigma(f(a, b) - f(a', b)), \quad
              f(a, b) = \sigma(a \cdot b / \sqrt D)

    with a the `first`, b the `second`, and a' and b' those of the row `giver`. As `published`: log sigma(sigma(...)),
    and f(a, b) = sigma(a . b).
    Departure: products are divided by the root of the width D, or those of 300 features leave the sigmoid no gradient.
    """
    scale = 1.0 if published else first.shape[-1] ** -0.5

    def near(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(scale * (a * b).sum(axis=-1))

    own, total = near(first, second), jnp.zeros(first.shape[:-1])
    for other in (near(first, second[giver]), near(first[giver], second)):
        distance = own - other
        total = total - jax.nn.log_sigmoid(jax.nn.sigmoid(distance) if published else distance)
    return total


class Alignment(Reader):
    r"""Two graphs: of words and their concepts, and of the last turn, its clauses and what follows from each.

    The context attends to each graph (prior), and so does the response (posterior), to which a KL pulls the prior. The
    summaries of the graphs must be near each other (coarse), and each fact near the feeling of its turn or clause
    (fine). The decoder reads W_2 ReLU(W_1 [h; k; e]), with k the summary of the facts, and e that of concepts and
    feelings, from which the emotion is read. Every decoder layer attends to both graphs.

    Departure: layers read the source first, then the graphs; the mean of the feelings excludes padding; the posterior's
    queries have no role embedding; graphs have no dropout. Negatives come from the next row; a batch of one has none.
    Unless `published`, intensities weigh the words and concepts behind their norm, which would remove them.
    Source: Zhou et al. 2023 (CASE), released code.
    """

    settings: AlignmentSettings
    losses: ClassVar[tuple[str, ...]] = ("emotion", "bag", "kl", "coarse", "fine")

    def setup(self) -> None:
        c = self.config
        self.concept_graph, self.fact_graph = GraphLayer(c), GraphLayer(c, KINDS)
        self.role = self.param("role", normal(c.initial_embedding_stddev()), (c.d_model,))
        self.intense = c.make_norm()
        self.follows, self.feels = (Stack(c, c.num_encoder_layers, decoder=False) for _ in range(2))
        self.felt, self.to_feeling = RefinedContext(c), Linear(c.d_model)
        self.query = Linear(c.d_model)
        self.join, self.gate = Linear(c.d_model), Linear(1)
        self.head = Linear(len(EMOTIONS))
        self.hidden, self.out = (Linear(c.d_model, use_bias=False) for _ in range(2))
        self.bag_hidden, self.bag = Linear(c.d_model), Linear(c.vocab_size)

    def __call__(self, batch: ClassicBatch, words: EncoderDecoder, read: Read, *, train: bool) -> Read:
        concepts, facts = batch.concepts, batch.cognition
        assert concepts is not None
        assert facts is not None
        affection = self._affection(batch, concepts, words)
        cognition = self._cognition(facts, words, train)
        feelings = self._feelings(facts, words, read, train)
        query, graphs = jnp.tanh(self.query(read.context)), (affection, cognition)
        (felt, felt_shares), (known, known_shares) = (self._chosen(query, graph) for graph in graphs)
        gate = jax.nn.sigmoid(self.gate(self.join(jnp.concatenate([felt, feelings[:, 0]], axis=-1))))
        emotion = gate * felt + (1.0 - gate) * feelings[:, 0]
        logits = self.head(emotion)
        beside = jnp.broadcast_to(
            jnp.concatenate([known, emotion], axis=-1)[:, None], (*read.states.shape[:2], 2 * self.config.d_model)
        )
        joined = jnp.concatenate([read.states.astype(jnp.float32), beside], axis=-1)
        dtype = read.states.dtype
        memories = {
            name: Memory(graph.states.astype(dtype), graph.mask)
            for name, graph in (("cognition", cognition), ("affection", affection))
        }
        losses = {
            **read.losses,
            **self._of_the_response(batch, words, graphs, (felt_shares, known_shares), train),
            **self._aligned(batch, facts, felt, known, cognition, feelings),
        }
        return read.replace(  # type: ignore[attr-defined]
            states=self.out(jax.nn.relu(self.hidden(joined))).astype(dtype),
            emotion=logits,
            memories={**read.memories, **memories},
            losses=losses,
        )

    def _chosen(self, query: Float[Array, "B D"], graph: Memory) -> tuple[Float[Array, "B D"], Float[Array, "B J"]]:
        return chosen(query, graph.states, graph.mask, published=self.settings.published)

    def _affection(self, batch: ClassicBatch, concepts: ConceptWords, words: EncoderDecoder) -> Memory:
        """Returns the words and concepts, weighted by the intensity of their emotion; the weights have a mean of 1."""
        assert batch.intensity is not None
        nodes = concept_nodes(batch, concepts, words, self.role)
        mask = jnp.concatenate([batch.source_mask, concepts.mask], axis=1)
        intensity = jnp.concatenate([batch.intensity, concepts.intensity], axis=1)
        shares = jax.nn.softmax(jnp.where(mask, intensity, MASKED))
        edges = concept_edges(batch.source_mask, concepts)
        edges = jnp.pad(edges, ((0, 0), (0, concepts.mask.shape[1]), (0, 0)))
        edges = (edges | jnp.swapaxes(edges, 1, 2) | jnp.eye(edges.shape[1], dtype=bool)[None]) & mask[:, None]
        states = self.concept_graph(nodes, edges.astype(jnp.int32))
        if self.settings.published:
            return Memory(self.intense(shares[..., None] * states), mask)
        weights = shares * mask.sum(axis=1, keepdims=True)
        return Memory(weights[..., None] * self.intense(states), mask)

    def _cognition(self, facts: FactTexts, words: EncoderDecoder, train: bool) -> Memory:
        """Returns the facts about what follows."""
        rows, num_turns = facts.turns.shape[:2]
        nodes = []
        for texts in ((facts.turns, facts.turns_mask), (facts.tails, facts.tails_mask)):
            ids, real = (x.reshape(-1, x.shape[-1]) for x in texts)
            first = encode_texts(self.follows, words, ids, real, train=train)[:, 0]
            nodes.append(first.astype(jnp.float32).reshape(rows, -1, self.config.d_model))
        read = self.fact_graph(jnp.concatenate(nodes, axis=1), fact_edges(facts))
        return Memory(read[:, num_turns:], facts.tails_mask.any(axis=-1))

    def _feelings(self, facts: FactTexts, words: EncoderDecoder, read: Read, train: bool) -> Float[Array, "B U D"]:
        """Returns the context refined by the feelings of the turn and of each clause."""
        rows, num_turns = facts.feelings.shape[:2]
        ids, real = (x.reshape(rows * num_turns, -1) for x in (facts.feelings, facts.feelings_mask))
        mean = masked_mean(encode_texts(self.feels, words, ids, real, train=train), real)
        states, mask = (jnp.repeat(x, num_turns, axis=0) for x in (read.states, read.mask))
        felt = self.felt(mean, states, mask, train=train)[:, 0]
        return self.to_feeling(felt).reshape(rows, num_turns, -1)

    def _of_the_response(
        self,
        batch: ClassicBatch,
        words: EncoderDecoder,
        graphs: Sequence[Memory],
        prior: Sequence[Float[Array, "B J"]],
        train: bool,
    ) -> dict[str, tuple[Float[Array, " B"], Bool[Array, " B"]]]:
        """Returns the posterior's losses: "bag" predicts the response's words from it, "kl" pulls the prior to it."""
        ids = jnp.concatenate([batch.source[:, :1], batch.target], axis=1)
        mask = jnp.concatenate([jnp.ones_like(batch.target_mask[:, :1]), batch.target_mask], axis=1)
        found = [
            self._chosen(encode_texts(stack, words, ids, mask, train=train)[:, 0].astype(jnp.float32), graph)
            for stack, graph in zip((words.encoder, self.follows), graphs, strict=True)
        ]
        bag = self.bag(jnp.tanh(self.bag_hidden(jnp.concatenate([vector for vector, _ in found], axis=-1))))
        picked = jnp.take_along_axis(jax.nn.log_softmax(bag), batch.target, axis=1)
        length = batch.target_mask.sum(axis=1)
        nll = -jnp.where(batch.target_mask, picked, 0.0).sum(axis=1) / jnp.maximum(length, 1)
        divergence = sum(
            (mean_divergence(q, p, graph.mask) for (_, q), p, graph in zip(found, prior, graphs, strict=True)),
            start=jnp.zeros(()),
        )
        return {"bag": (nll, length > 0), "kl": (divergence, length > 0)}

    def _aligned(
        self,
        batch: ClassicBatch,
        facts: FactTexts,
        felt: Float[Array, "B D"],
        known: Float[Array, "B D"],
        cognition: Memory,
        feelings: Float[Array, "B U D"],
    ) -> dict[str, tuple[Float[Array, " B"], Bool[Array, " B"]]]:
        giver, published = next_rows(batch.valid), self.settings.published
        others = giver != jnp.arange(len(giver))
        any_fact = cognition.mask.any(axis=1)
        coarse = nearness(known, felt, giver, published=published)
        at = jnp.maximum(facts.of, 0)
        own = jnp.take_along_axis(feelings, at[..., None], axis=1)
        told = cognition.mask & jnp.take_along_axis(facts.feelings_mask.any(axis=-1), at, axis=1)
        counted = told & told[giver] & others[:, None]
        each = jnp.where(counted, nearness(cognition.states, own, giver, published=published), 0.0)
        fine = each.sum(axis=1) / jnp.maximum(counted.sum(axis=1), 1)
        return {"coarse": (coarse, others & any_fact & any_fact[giver]), "fine": (fine, counted.any(axis=1))}
