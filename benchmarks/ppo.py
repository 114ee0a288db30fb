"""Iterations of PPO on an encoder-decoder: empax against an eager PyTorch loop around Hugging Face's `generate`.

Rollout, log-probabilities and values of policy and reference, reward, advantages, and all updates; once on contexts of
a corpus, which each side batches as in training, and once on one batch with the same padding. Before timing, both sides
must agree on one fixed rollout: on its log-probabilities and values, its advantages, and the losses and gradient norms
of all its updates.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import texts
from benchmarks.eager_ppo import Answers, EagerPpo
from benchmarks.forward import Inputs, random_inputs
from benchmarks.paired import Row, arguments, report, seconds, timed
from benchmarks.shapes import fields_of
from benchmarks.sides import TOLERANCE, Sides, check_agreement, on_device, random_model, use
from empax.core.memory import keep_freed_memory
from empax.core.types import Batch, Params, TrainState
from empax.data import features
from empax.data.batches import WINDOW_BATCHES, BatchPlan
from empax.decoding.settings import DecodeSettings
from empax.models.heads import ClassificationHead
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator
from empax.systems.emprl.advantages import response_mask
from empax.systems.emprl.policy import value_head
from empax.systems.emprl.rewards import Part, Reward, compiled
from empax.systems.emprl.rollouts import PolicyBatch, Rollout
from empax.systems.emprl.settings import PpoTaskSettings
from empax.systems.emprl.tasks import Ppo
from empax.training.optimizer import OptimizerSettings, make_optimizer
from empax.training.step import make_iteration_start, make_train_step

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "what either side frees stays with the process for later (empax.core.memory), as in runs of empax.main",
    "the same random initial float32 weights of policy, reference and value head, no dropout; --dtype is the type that "
    "the model computes in (theirs: torch.autocast); losses, rewards, advantages and AdamW in float32",
    "contexts: those of 64 batches of the corpus, at most 200 tokens; theirs in a random order, each batch padded to "
    "its longest row, as trl 0.9 does; ours in batches of like length, padded to buckets (`empax.data.batches`); of "
    "either, the batches that are timed are evenly spread over the padded lengths",
    "one padded batch: the same random sources, rows padded on the right, a quarter of the tokens is padding",
    "sampling with k = 20, T = 0.9, at least 4 tokens before the end; both stop once all rows have ended "
    "(response_tokens: how long they were)",
    "teacher-forced log-probabilities and values of the policy, log-probabilities of a reference of its own weights",
    "the reward (share of even ids) on ids, standardised by running statistics; k1 KL with the adaptive coefficient; "
    "rewards and advantages whitened; GAE",
    "each update on its mini-batch: clipped losses of policy and values, entropy for the log, gradients, clipped at "
    "norm 1, AdamW at 1e-5 (theirs fused); rows drawn anew in every epoch; no layer is recomputed",
    "theirs: transformers' default attention and its generate with a cache, eager; ours: compiled before "
    "(compile_seconds), the scan over layers unrolled as --unroll says",
)

OPTIMIZER = OptimizerSettings(learning_rate=1e-5)

DTYPES = tuple(sorted(TOLERANCE))

SCRATCH = {"vocab_size": 10_000, "d_model": 256, "d_ff": 1024, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 4}
"""T5 with the sizes of the Transformer that the recipes train from scratch, which has one encoder layer less.

The cache of transformers' T5 does not support fewer layers in the encoder than in the decoder.
"""

SHAPES: dict[str, dict[str, Any]] = {"t5-small": {}, "scratch": SCRATCH}
"""Differences from T5-small."""

_EMBEDDING_SCALE = 0.3
"""Hugging Face initialises T5's embeddings so large that a random model only repeats its last token."""


class Policy(NamedTuple):
    """The policy on both sides, the parameters of its value head, and the settings of its training."""

    sides: Sides
    value: Params
    settings: PpoTaskSettings


class OurPpo:
    """The task, compiled with the functions that every recipe uses, and its state."""

    def __init__(self, policy: Policy, inputs: Sequence[Inputs], *, epochs: int, minibatches: int):
        sides, value, settings = policy
        config = sides.model.config
        eos_id, pad_id = sides.theirs.config.eos_token_id, sides.theirs.config.pad_token_id
        decoder = Decoder(settings.rollout, start_id=config.start_id, eos_id=eos_id, pad_id=pad_id)
        generator = Generator(sides.model, decoder, ClassificationHead(1), emotion_weight=0.0)
        self.task: Any = Ppo(generator, Reward((Part("share", 1.0, compiled(even_share)),)), settings)
        params = copied({"model": sides.params, "value": value})
        optimizer = make_optimizer(OPTIMIZER, params, total_steps=1)
        self.state = TrainState(
            jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0), self.task.init_memory()
        )
        self.frozen = {"reference": {"model": copied(sides.params)}, "reward": self.task.reward.frozen()}
        self.batches = [policy_batch(one) for one in inputs]
        self.begin = make_iteration_start(self.task)
        self.step = make_train_step(self.task, optimizer, epochs=epochs, minibatches=minibatches)
        self.phases: list[tuple[float, float]] = []
        self.lengths: list[float] = []

    def run(self) -> None:
        """Runs an iteration on each batch."""
        for batch in self.batches:
            start = time.perf_counter()
            state, rated, metrics = jax.block_until_ready(self.begin(self.state, self.frozen, batch))
            rolled = time.perf_counter()
            self.state, _ = jax.block_until_ready(self.step(state, self.frozen, rated))
            self.phases.append((rolled - start, time.perf_counter() - rolled))
            self.lengths.append(float(metrics["response_tokens"].value()))


class TheirPpo:
    """`EagerPpo` on the same sources."""

    def __init__(self, policy: Policy, inputs: Sequence[Inputs], *, epochs: int, minibatches: int):
        sides, value, settings = policy
        head = torch.nn.Linear(sides.model.config.d_model, 1)
        with torch.no_grad():
            head.weight.copy_(torch.tensor(np.asarray(value["out"]).T))
            head.bias.copy_(torch.tensor(np.asarray(value["out_bias"])))
        self.loop = EagerPpo(
            copy.deepcopy(sides.theirs), head, their_even_share, settings, OPTIMIZER,
            epochs=epochs, minibatches=minibatches, dtype=getattr(torch, sides.model.config.dtype),
        )  # fmt: skip
        self.batches = [(torch.tensor(one.source).long(), torch.tensor(one.mask).long()) for one in inputs]
        self.phases: list[tuple[float, float]] = []
        self.lengths: list[float] = []

    def run(self) -> None:
        """Runs an iteration on each batch."""
        for source, mask in self.batches:
            start = time.perf_counter()
            answers = self.loop.rollout(source, mask)
            advantages, returns = self.loop.credit(answers)
            rolled = time.perf_counter()
            self.loop.learn(answers, advantages, returns)
            self.phases.append((rolled - start, time.perf_counter() - rolled))
            self.lengths.append(answers.mask.sum(dim=1).float().mean().item())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=2, devices=True, batches=6, dtype=DTYPES)
    texts.add_flag(parser)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=tuple(SHAPES), help="shapes of the policy (both)")
    parser.add_argument(
        "--dtype", nargs="*", choices=DTYPES, default=DTYPES[1:], help="types of the model's arithmetic (float32)"
    )
    parser.add_argument("--batch", type=int, default=32, help="rows of a rollout (32)")
    parser.add_argument("--batches", type=int, default=1, help="batches of contexts to roll out in a round (1)")
    parser.add_argument(
        "--buckets", type=int, nargs="+", default=[32, 48, 72, 112, 200], help="ours (32 48 72 112 200)"
    )
    parser.add_argument("--source", type=int, default=64, help="tokens of a source in the padded batch (64)")
    parser.add_argument("--new-tokens", type=int, default=30, help="maximum tokens of a response (30)")
    parser.add_argument("--epochs", type=int, default=4, help="how often each response is learnt from (4)")
    parser.add_argument("--minibatches", type=int, default=1, help="updates in an epoch (1, as in EmpRL's runs)")
    parser.add_argument("--unroll", type=int, default=6, help="layers in one turn of our scan (6)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.batch, options.source, options.new_tokens, options.rounds = 4, 8, 6, 1
        options.epochs, options.minibatches, options.unroll = 2, 2, 1
        options.batches, options.buckets = 1, [16, 24]
    if options.batch % options.minibatches:
        parser.error(f"--minibatches={options.minibatches} does not divide --batch={options.batch}")
    use(options.device)
    rows: dict[str, Row] = {}
    for shape in options.shape:
        vocab_size = fields(shape, options)["vocab_size"]
        padded = random_inputs(vocab_size, options.batch, options.source, options.new_tokens)
        work = {"contexts": context_batches(options, vocab_size), "one padded batch": ([padded], [padded])}
        for dtype in options.dtype:
            for name, row in measure(shape, dtype, work, options).items():
                rows[f"{shape}, {dtype}, {name}"] = row
    sizes = (
        f"{texts.name_of(options.data)}: {options.batches} batches of {options.batch} contexts a round, buckets "
        f"{options.buckets}; or {options.batch} sources of {options.source} tokens; {options.new_tokens} new tokens, "
        f"{options.epochs} epochs of {options.minibatches} mini-batches; seconds are of one iteration"
    )
    return report("ppo", rows, (*HELD_EQUAL, sizes), smoke=options.smoke, device=options.device)


def context_batches(options: argparse.Namespace, vocab_size: int) -> tuple[list[Inputs], list[Inputs]]:
    """Returns a few of each side's batches of the same contexts, evenly spaced over their lengths."""
    found = texts.instances(options.data, "train")
    tokenizer = texts.tokenizer_of(found, vocab_size)
    longest = options.buckets[-1]
    ids = [one[-longest:] for one in tokenizer.encode_batch([" ".join(i.context) for i in found])]
    plan = BatchPlan(np.array([len(one) for one in ids]), options.batch, options.buckets, seed=0)
    target = np.zeros((options.batch, 1), np.int32)  # unused

    def collate(indices: np.ndarray, length: int) -> Inputs:
        return Inputs(*features.pad([ids[i] for i in indices], length, tokenizer.pad_id), target)

    planned = [plan.plan(step) for step in range(min(WINDOW_BATCHES, plan.steps_per_epoch))]
    ours = [one for one in planned if (one[0] >= 0).all()]
    mixed = np.random.default_rng(0).permutation(np.concatenate([indices for indices, _ in ours]))
    theirs = [(rows, max(len(ids[i]) for i in rows)) for rows in mixed.reshape(-1, options.batch)]
    sampled = [[collate(*one) for one in spread(side, options.batches)] for side in (ours, theirs)]
    return sampled[0], sampled[1]


def spread(batches: Sequence[tuple[np.ndarray, int]], count: int) -> list[tuple[np.ndarray, int]]:
    """Returns `count` of the (rows, padded length), evenly spaced from the shortest to the longest."""
    ascending = sorted(batches, key=lambda one: one[1])
    return [ascending[int((place + 0.5) * len(batches) / count)] for place in range(count)]


def measure(
    shape: str, dtype: str, work: Mapping[str, tuple[list[Inputs], list[Inputs]]], options: argparse.Namespace
) -> dict[str, Row]:
    """Measures whole iterations; durations of their parts and lengths of responses are in the facts."""
    print(f"{shape}, {dtype}: compiling, and comparing both sides", file=sys.stderr, flush=True)
    on_device("cpu")
    policy, inputs = prepare(shape, dtype, options)
    # With one mini-batch, the order of rows does not matter.
    whole = {"epochs": options.epochs, "minibatches": 1}
    error = check(OurPpo(policy, [inputs], **whole), TheirPpo(policy, [inputs], **whole), inputs)
    print(f"{shape}, {dtype}: both sides agree to {error:.2g}", file=sys.stderr, flush=True)
    on_device(options.device, policy.sides.theirs)
    updates = {"epochs": options.epochs, "minibatches": options.minibatches}
    rows = {}
    for name, batches in work.items():
        ours, theirs = OurPpo(policy, batches[0], **updates), TheirPpo(policy, batches[1], **updates)
        compiling = seconds(ours.run)
        print(f"{shape}, {dtype}, {name}: compiled in {compiling:.0f} s", file=sys.stderr, flush=True)
        took = timed(ours.run, theirs.run, options.rounds, pieces=len(batches[0]))
        facts: dict[str, Any] = {"largest_error": float(f"{error:.2g}"), "compile_seconds": round(compiling, 2)}
        for whose, side, own in zip(("ours", "theirs"), (ours, theirs), batches, strict=True):
            counted = options.rounds * len(own)
            rollouts, learnt = zip(*side.phases[-counted:], strict=True)
            facts[f"rollout_seconds_{whose}"] = round(statistics.fmean(rollouts), 4)
            facts[f"update_seconds_{whose}"] = round(statistics.fmean(learnt), 4)
            facts[f"response_tokens_{whose}"] = round(statistics.fmean(side.lengths[-counted:]), 2)
            facts[f"source_tokens_{whose}"] = sum(one.source.size for one in own)  # including padding
        rows[name] = Row(*took, "seconds", facts=facts)
    return rows


def fields(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the policy's `config.json`."""
    small = {"vocab_size": 400}  # the minimum for a byte-level tokenizer
    return fields_of("t5-small", small=options.smoke, **(small if options.smoke else SHAPES[shape]))


def prepare(shape: str, dtype: str, options: argparse.Namespace) -> tuple[Policy, Inputs]:
    """Returns the policy, and the sources with a fixed answer to each."""
    described = fields(shape, options)
    sides = random_model(described, unroll=options.unroll, dtype=dtype)
    params = copied(sides.params)  # theirs will change, and may share its memory
    params["token_embedding"] = params["token_embedding"] * _EMBEDDING_SCALE
    with torch.no_grad():
        sides.theirs.get_input_embeddings().weight.mul_(_EMBEDDING_SCALE)
    width, settings = sides.model.config.d_model, stage(options.new_tokens)
    value = value_head(settings).init(jax.random.key(1), jnp.zeros((1, width)))["params"]
    inputs = random_inputs(described["vocab_size"], options.batch, options.source, options.new_tokens)
    return Policy(sides._replace(params=params), value, settings), inputs


def stage(new_tokens: int) -> PpoTaskSettings:
    """Returns the default settings of PPO, except for the length of a response."""
    rollout = DecodeSettings(method="sample", max_tokens=new_tokens, min_tokens=4, temperature=0.9, top_k=20)
    return PpoTaskSettings(rollout=rollout, rewards=())


def copied(params: Params) -> Params:
    """Copies parameters, since a step that donates its state must not donate shared memory."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)


def policy_batch(inputs: Inputs) -> PolicyBatch:
    """Returns the sources as a batch, without judgements of their contexts."""
    rows = len(inputs.source)
    mask = jnp.asarray(inputs.mask)
    target = jnp.asarray(inputs.target, jnp.int32)  # unused
    batch = Batch(
        jnp.asarray(inputs.source, jnp.int32), mask, target, jnp.ones(target.shape, bool), jnp.ones(rows, bool)
    )
    row = jnp.arange(rows, dtype=jnp.int32)
    return PolicyBatch(inputs=batch, row=row, wanted=jnp.zeros((rows, 1, 3)), merit=jnp.zeros(rows))


def even_share(rollout: Rollout) -> jax.Array:
    """Returns the share of even ids in each response."""
    even = (rollout.tokens % 2 == 0) & rollout.mask
    return even.sum(axis=1) / jnp.maximum(rollout.mask.sum(axis=1), 1)


def their_even_share(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the same in PyTorch."""
    return ((tokens % 2 == 0) & mask).sum(dim=1) / mask.sum(dim=1)


def check(ours: OurPpo, theirs: TheirPpo, inputs: Inputs) -> float:
    """Returns the largest relative error between both sides' outputs, advantages and updates on one fixed rollout.

    Noise makes policy, sampling policy and reference differ, so that no ratio is 1 and no KL 0. Trains both sides.

    Raises:
      DisagreementError: a difference exceeds TOLERANCE.
    """
    errors = []

    def agree(what: str, found: Any, expected: Any) -> None:
        tolerance = TOLERANCE[str(ours.task.generator.model.config.dtype)]
        errors.append(check_agreement(what, found, expected, tolerance=tolerance))

    eos_id = ours.task.generator.decoder.eos_id
    tokens = ended(inputs.target, eos_id, ours.task.generator.decoder.pad_id)
    mask = np.asarray(response_mask(jnp.asarray(tokens), eos_id=eos_id))
    batch, (source, source_mask), loop = ours.batches[0], theirs.batches[0], theirs.loop
    read = jax.jit(lambda params: ours.task.read(params, batch, jnp.asarray(tokens), ours.task.encoded(params, batch)))
    log_probs, values, _ = read(ours.state.params)
    with torch.no_grad():
        expected, hidden, _ = loop.read(loop.model, source, source_mask, torch.tensor(tokens).long())
        agree("log-probabilities", log_probs[mask], expected.numpy()[mask])
        agree("values", values[mask], loop.value(hidden).numpy()[mask])

    rng = np.random.default_rng(0)
    near = [np.asarray(one) + rng.normal(0.0, 0.3, mask.shape).astype(np.float32) for one in (log_probs,) * 2]
    near.append(np.asarray(values) + rng.normal(0.0, 0.3, mask.shape).astype(np.float32))
    old, reference, old_values = near
    rollout = Rollout(batch, *map(jnp.asarray, (tokens, mask, old, reference)), values=jnp.asarray(old_values))
    credit = jax.jit(lambda frozen, rollout, memory: ours.task.credit(frozen, ours.task.rate(frozen, rollout), memory))
    rated, memory, _ = credit(ours.frozen, rollout, ours.state.memory)
    answers = Answers(source, source_mask, torch.tensor(tokens).long(), *map(torch.tensor, (mask, *near)))
    advantages, returns = loop.credit(answers)
    agree("scores", rated.scores, their_even_share(answers.tokens, answers.mask))
    agree("advantages", rated.advantages[mask], advantages.numpy()[mask])
    agree("returns", rated.returns[mask], returns.numpy()[mask])
    agree("KL coefficient", memory.kl_coefficient, loop.beta)

    ours.state, metrics = ours.step(ours.state, ours.frozen, rated)
    expected = loop.learn(answers, advantages, returns)
    # The policy's loss is a small difference of numbers as large as the advantages, so that rounding dominates it.
    parts = ("policy_loss", "value_loss", "loss")
    agree("losses over all updates", [metrics[name].value() for name in parts], [expected[name] for name in parts])
    for name in ("entropy", "grad_norm"):
        agree(f"{name} over all updates", metrics[name].value(), expected[name])
    return max(errors)


def ended(tokens: np.ndarray, eos_id: int, pad_id: int) -> np.ndarray:
    """Shortens responses to half to all of the tokens; all but the longest end."""
    rows, longest = tokens.shape
    last = np.linspace(longest // 2, longest, rows).astype(int)[:, None]
    place = np.arange(longest)[None]
    return np.where(place == last, eos_id, np.where(place > last, pad_id, tokens)).astype(np.int32)


if __name__ == "__main__":
    keep_freed_memory()
    main()
