"""Two small tasks of the kinds that systems are made of, through nothing but what all systems share.

"knowledge" attends to facts in every decoder layer and ranks its beams anew; "diffusion" draws noise in its loss and
copies words of the source. Each trains, is evaluated, resumes and answers as any system's task does.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from empax.core.shapes import shapes_of
from empax.core.system import Assembly, Sketch, System, TaskSpec
from empax.core.types import Batch, Generated, Mean
from empax.data.batches import SequenceExamples
from empax.data.store import check_prepared, load_instances, run_tokenizer
from empax.decoding.settings import DecodeSettings
from empax.losses.cross_entropy import cross_entropy, token_log_probs
from empax.models.layers import apply
from empax.models.memory_attention import Memory
from empax.models.transformer import EncoderDecoder, TransformerConfig
from empax.parts.generator.answerer import Answerer, AnswerExamples
from empax.parts.generator.decoder import Decoder
from empax.training.checkpoint import load_params

TOKENS, WIDTH = 8, 16


@dataclasses.dataclass(frozen=True)
class Shared:
    """What both tasks share: nothing."""


@dataclasses.dataclass(frozen=True)
class Settings:
    facts: int = 4


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """The first words of a context are its facts."""

    model: EncoderDecoder
    decoder: Decoder
    facts: int
    heads = ()

    def init(self, rng, batch):
        source = batch.source, batch.source_mask
        facts = {"facts": Memory(jnp.zeros((*batch.source.shape, WIDTH)), batch.source_mask)}
        return self.model.init(rng, *source, batch.target, memories=facts)["params"]

    def states(self, params, batch, rng):
        encode = lambda *read: apply(self.model, params, *read, method="encode", rng=rng)  # noqa: E731
        known = batch.source[:, : self.facts], batch.source_mask[:, : self.facts]
        return encode(batch.source, batch.source_mask), {"facts": Memory(encode(*known), known[1])}

    def logits(self, params, batch, rng):
        states, memories = self.states(params, batch, rng)
        read = batch.target, states, batch.source_mask
        return apply(self.model, params, *read, memories=memories, method="decode", rng=rng)

    def loss(self, params, frozen, batch, rng, *, train):
        logits = self.logits(params, batch, rng if train else None)
        return cross_entropy(logits, batch.target, batch.target_mask & batch.valid[:, None]), {}

    def generate(self, params, frozen, batch, rng):
        states, memories = self.states(params, batch, None)
        beside = {"memories": memories}
        return self.decoder.from_states(self.model, params, states, batch.source_mask, rng, beside=beside)

    def read(self, params, batch):
        return likelihood(self.logits(params, batch, None), batch)


@dataclasses.dataclass(frozen=True)
class Diffusion:
    """A vector is freed of noise, given the context; words are drawn near it, or copied from the context."""

    vocab_size: int
    heads = ()

    def init(self, rng, batch):
        keys = jax.random.split(rng, 3)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        return {"words": normal(keys[0], self.vocab_size, WIDTH), "places": normal(keys[1], TOKENS, WIDTH),
                "denoise": normal(keys[2], 2 * WIDTH + 1, WIDTH), "gate": jnp.zeros(WIDTH)}  # fmt: skip

    def context(self, params, batch):
        seen = jnp.where(batch.source_mask[..., None], params["words"][batch.source], 0.0)
        return seen, seen.sum(axis=1) / jnp.maximum(batch.source_mask.sum(axis=1, keepdims=True), 1)

    def noise(self, params, noisy, context, time):
        return jnp.tanh(jnp.concatenate([noisy, context, time], axis=1) @ params["denoise"])

    def log_probs(self, params, batch, vector):
        """Of words at every place: a mixture of the vocabulary and of the context's words."""
        seen, _ = self.context(params, batch)
        at = vector[:, None] + params["places"][None, : batch.target.shape[1]]
        said = jax.nn.softmax(at @ params["words"].T)
        attention = jnp.einsum("BTD,BSD->BTS", at, seen)
        attention = jax.nn.softmax(jnp.where(batch.source_mask[:, None], attention, -1e9))
        copied = jax.vmap(lambda ids, weights: jnp.zeros((TOKENS, self.vocab_size)).at[:, ids].add(weights))(
            batch.source, attention[:, :TOKENS]
        )
        gate = jax.nn.sigmoid(at @ params["gate"])[..., None]
        return jnp.log(gate * said + (1.0 - gate) * copied[:, : said.shape[1]] + 1e-9)

    def loss(self, params, frozen, batch, rng, *, train):
        first, second = jax.random.split(rng)
        _, context = self.context(params, batch)
        time = jax.random.uniform(first, (len(batch.valid), 1), minval=0.1)
        noise = jax.random.normal(second, context.shape)
        clean = params["words"][batch.target].mean(axis=1)
        noisy = jnp.sqrt(1.0 - time) * clean + jnp.sqrt(time) * noise
        error = jnp.square(self.noise(params, noisy, context, time) - noise).mean(axis=1)
        mask = batch.target_mask & batch.valid[:, None]
        said = Mean.of(-token_log_probs(self.log_probs(params, batch, clean), batch.target), mask)
        noise_error = Mean.of(error, batch.valid, mask.sum(axis=1).astype(jnp.float32))
        return Mean(said.total + noise_error.total, said.weight), {"noise_error": Mean.of(error, batch.valid)}

    def sampled(self, params, batch):
        """From the mean of the noise, freed of it in one step."""
        _, context = self.context(params, batch)
        time = jnp.full((len(batch.valid), 1), 0.9)
        none = jnp.zeros_like(context)
        return (none - jnp.sqrt(time) * self.noise(params, none, context, time)) / jnp.sqrt(1.0 - time)

    def generate(self, params, frozen, batch, rng):
        found = self.log_probs(params, batch.replace(target=jnp.zeros((len(batch.valid), TOKENS), jnp.int32)),
                               self.sampled(params, batch))  # fmt: skip
        return Generated(found.argmax(-1)[:, None].astype(jnp.int32), found.max(-1).sum(-1)[:, None])

    def read(self, params, batch):
        return likelihood(self.log_probs(params, batch, self.sampled(params, batch)), batch)


def likelihood(logits, batch):
    log_probs = jnp.where(batch.target_mask, token_log_probs(logits, batch.target), 0.0)
    return {"nll": -log_probs.sum(axis=1), "num_tokens": batch.target_mask.sum(axis=1).astype(jnp.float32)}


def knowledge(settings, tokenizer):
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, d_model=WIDTH, num_heads=2, head_dim=8, d_ff=32, num_encoder_layers=1,
        num_decoder_layers=1, position="sinusoidal", memories=("facts",), start_id=tokenizer.start_id,
    )  # fmt: skip
    decoding = DecodeSettings("beam", TOKENS, num_beams=2, rerank="similarity", rerank_similarity=0.5)
    decoder = Decoder(decoding, tokenizer.start_id, tokenizer.eos_id, tokenizer.pad_id)
    return Knowledge(EncoderDecoder(config), decoder, settings.facts)


def diffusion(settings, tokenizer):
    return Diffusion(tokenizer.vocab_size)


def spec(make):
    def examples(instances, tokenizer):
        contexts = tokenizer.encode_batch([" ".join(i.context) for i in instances])
        answers = tokenizer.encode_batch([i.response for i in instances])
        answers = [[*row[: TOKENS - 1], tokenizer.eos_id] for row in answers]
        return SequenceExamples(contexts, answers, pad_id=tokenizer.pad_id, max_target_tokens=TOKENS)

    def build(settings, run):
        tokenizer = run_tokenizer(run)
        train, validation = (examples(load_instances(run, split), tokenizer) for split in ("train", "validation"))
        return Assembly(make(settings, tokenizer), train, validation)

    def sketch(settings, run, rows, length):
        return Sketch(make(settings, run_tokenizer(run, planned=True)), shapes_of(Batch, B=rows, S=length, T=TOKENS))

    def answer(settings, run, options):
        tokenizer = run_tokenizer(run)
        notes = lambda found: AnswerExamples(examples(found, tokenizer), [{} for _ in found])  # noqa: E731
        task, params = make(settings, tokenizer), load_params(run.files.stage(options.stage))
        return Answerer(task, params, notes, tokenizer, options.buckets or (32,), single=not options.buckets)

    return TaskSpec(Settings, lambda _, run: check_prepared(run), build, sketch, answer=answer)


SYSTEM = System("toys", Shared, {"knowledge": spec(knowledge), "diffusion": spec(diffusion)})
