"""Training steps of Fusion-in-Decoder with the sizes of T5-small: empax against Hugging Face's T5 in PyTorch.

Theirs reads the passages by the usual reshape, in two variants: padded to the maximum, as in the published code, and
padded to the lengths of our buckets. All must have the same loss before timing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutput

from benchmarks import texts
from benchmarks.paired import Row, arguments, report, timed
from benchmarks.shapes import fields_of
from benchmarks.sides import Sides, autocast, check_agreement, on_device, random_model, use, wait
from empax.core.memory import keep_freed_memory
from empax.core.types import Batch, Mean, Metrics, Params, TrainState
from empax.data import features
from empax.data.batches import BatchPlan
from empax.losses.cross_entropy import cross_entropy
from empax.losses.real_tokens import in_parts
from empax.models.attention_kernels import AttentionKernel
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.planning.sketches import count_flops
from empax.training.optimizer import OptimizerSettings, make_optimizer
from empax.training.step import make_eval_step, make_train_step

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "what either side frees stays with the process for later (empax.core.memory), as in runs of empax.main",
    "the same random initial weights, float32; arithmetic in --dtype (theirs: autocast); --dropout, training mode",
    "the same examples in the same batches: context and exemplar in each passage, exemplars drawn from the corpus",
    "the whole update: mean loss over the target's tokens, gradients, clipped at norm 1, AdamW at 1e-4 (theirs fused)",
    "tokens and arrays are made before; every shape is compiled before; no layer is recomputed on either side",
    "max padding: theirs reads 200 tokens a passage and 50 of the target, whatever the batch needs, ours our buckets",
    "our buckets: both sides read arrays of the same shapes",
)

_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True)
class FusionTask:
    """FiD's likelihood alone; `in_parts`: of real tokens, part by part (`losses.real_tokens`)."""

    model: FusionInDecoder
    in_parts: bool = False

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return self.model.init(rng, batch.source, batch.source_mask, batch.target)["params"]

    def loss(
        self, params: Params, frozen: Params, batch: Batch, rng: jax.Array, *, train: bool
    ) -> tuple[Mean, Metrics]:
        def apply(method: str, *args: Any, stream: int, **more: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(rng, stream)} if train else None
            return self.model.apply({"params": params}, *args, method=method, rngs=rngs, **more)

        how = {"deterministic": not train}
        states = apply("encode", batch.source, batch.source_mask, stream=0, **how)
        hidden = apply("decode_hidden", batch.target, states, batch.source_mask, stream=1, **how)

        def likelihood(mask: Any, states: Any, target: Any) -> tuple[Mean, Metrics]:
            logits = self.model.apply({"params": params}, *states, method="logits_from")
            return cross_entropy(logits, target, mask), {}

        given = batch.target_mask, [hidden], batch.target
        return in_parts(likelihood, *given) if self.in_parts else likelihood(*given)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=3, devices=True)
    texts.add_flag(parser)
    parser.add_argument("--shape", choices=("t5-small", "t5-base", "t5-1.5b"), default="t5-small", help="(t5-small)")
    parser.add_argument("--compile", action="store_true", help="compile theirs with torch.compile")
    parser.add_argument(
        "--dtype", choices=sorted(_TOLERANCE), default="float32", help="type of the arithmetic (float32)"
    )
    parser.add_argument("--passages", type=int, default=6, help="K (6)")
    parser.add_argument("--batch", type=int, default=8, help="examples a step (8)")
    parser.add_argument("--batches", type=int, default=6, help="steps a round, one batch each (6)")
    parser.add_argument("--buckets", type=int, nargs="+", default=[80, 112, 144, 200], help="ours (80 112 144 200)")
    parser.add_argument("--max-passage", type=int, default=200, help="maximum tokens of a passage (200)")
    parser.add_argument("--max-target", type=int, default=50, help="maximum tokens of a target (50)")
    parser.add_argument("--unroll", type=int, default=6, help="layers in one turn of our scan (6)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout of both sides (0.1)")
    parser.add_argument(
        "--attention", choices=get_args(AttentionKernel), default="auto", help="our attention program (auto)"
    )
    options = parser.parse_args(argv)
    if options.smoke:
        options.passages, options.batch, options.batches, options.rounds = 2, 2, 1, 1
        options.buckets, options.max_passage, options.max_target, options.unroll = [16, 24], 24, 10, 1
    vocab = {"vocab_size": 400} if options.smoke else {}
    use(options.device)
    fields = fields_of(options.shape, small=options.smoke, **vocab) | {"dropout_rate": options.dropout}
    pairs = make_batches(options, fields["vocab_size"])
    bucketed, padded = [one for one, _ in pairs], [one for _, one in pairs]
    sides = random_model(fields, dtype=options.dtype, unroll=options.unroll, attention=options.attention)
    task = FusionTask(FusionInDecoder(sides.model))
    on_device(options.device, sides.theirs)
    both = {"max padding": padded, "our buckets": bucketed}
    if options.buckets == [options.max_passage]:
        del both["max padding"]
    check(task, sides, bucketed[0], {name: batches[0] for name, batches in both.items()}, options.dtype)
    ours = our_steps(task, sides.params, bucketed)
    count = options.batch * len(pairs)
    flops = flops_of(task, sides.params, bucketed) // count
    rows = {}
    for name, theirs in both.items():
        steps = their_steps(sides.theirs, theirs, options.dtype, compiled=options.compile)
        facts = {"tokens_ours": source_tokens(bucketed), "tokens_theirs": source_tokens(theirs), "flops": flops}
        rows[name] = Row.of_rates(timed(ours, steps, options.rounds), count, "examples/s", **facts)
    where = f"{texts.name_of(options.data)}; {options.shape}"
    sizes = f"{where}, K = {options.passages}, {options.batch} examples a step, {options.dtype}"
    sizes += f", dropout {options.dropout}, our attention {options.attention}"
    return report("train_step", rows, (*HELD_EQUAL, sizes), smoke=options.smoke, device=options.device)


def flops_of(task: FusionTask, params: Params, batches: Sequence[Batch]) -> int:
    """Counts the floating-point operations of our updates, forward and backward, from their jaxprs."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        return task.loss(params, {}, batch, jax.random.key(0), train=True)[0].value()

    return sum(count_flops(jax.grad(loss), params, batch) for batch in batches)


def make_batches(options: argparse.Namespace, vocab_size: int) -> list[tuple[Batch, Batch]]:
    """Returns the first batches of an epoch, each padded to its bucket and to the maximum."""
    found = texts.instances(options.data, "train")
    tokenizer = texts.tokenizer_of(found, vocab_size)
    rng = np.random.default_rng(0)
    chosen = [found[i] for i in rng.permutation(len(found))[:4096]]
    form = texts.joined_form(tokenizer, options.max_passage)
    rows = texts.with_exemplars(form, chosen, chosen, options.passages, rng)
    ids = tokenizer.encode_batch([instance.response for instance in chosen])
    targets = [features.render_target(row, tokenizer.eos_id, options.max_target) for row in ids]
    longest = [texts.passage_tokens(row, options.max_passage) for row in rows]
    lengths = np.stack([longest, [len(ids) for ids in targets]], axis=1)
    plan = BatchPlan(lengths, options.batch, options.buckets, seed=0)

    def collate(indices: np.ndarray, source_tokens: int, target_tokens: int) -> Batch:
        source, mask = texts.passage_arrays(form, [rows[i] for i in indices], source_tokens)
        target, target_mask = features.pad([targets[i] for i in indices], target_tokens, tokenizer.pad_id)
        return Batch(source, mask, target, target_mask, np.ones(len(indices), bool))  # pyright: ignore

    pairs = []
    for step in range(min(options.batches, plan.steps_per_epoch)):
        indices, length = plan.plan(step)
        indices = indices[indices >= 0]
        multiple = min(-(-max(len(targets[i]) for i in indices) // 8) * 8, options.max_target)
        pairs.append((collate(indices, length, multiple), collate(indices, options.max_passage, options.max_target)))
    return pairs


def source_tokens(batches: Sequence[Batch]) -> int:
    """Counts the source tokens, including padding."""
    return sum(int(np.prod(batch.source.shape)) for batch in batches)


def our_steps(task: FusionTask, params: Params, batches: Sequence[Batch]) -> Callable[[], Metrics]:
    """Returns a function that makes one update per batch, with the train step of every recipe.

    It returns the metrics of the last update. `params` are donated.
    """
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-4), params, total_steps=1)
    step = make_train_step(task, optimizer)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key(0))

    def run() -> Metrics:
        nonlocal state
        for batch in batches:
            state, metrics = step(state, {}, batch)
        return jax.block_until_ready((state, metrics))[1]

    return run


def their_steps(model: Any, batches: Sequence[Batch], dtype: str, *, compiled: bool) -> Callable[[], None]:
    """Returns the same in PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    tensors = [to_torch(batch) for batch in batches]
    loss_of = functools.partial(their_loss, model)
    loss_of = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def run() -> None:
        model.train()
        for batch in tensors:
            with autocast(getattr(torch, dtype)):
                loss = loss_of(*batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        wait()

    return run


def to_torch(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns source, mask and labels; -100 is ignored."""
    labels = np.where(batch.target_mask, batch.target, -100)
    return torch.tensor(batch.source).long(), torch.tensor(batch.source_mask).long(), torch.tensor(labels).long()


def their_loss(model: Any, source: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the loss with the usual reshape: passages are rows for the encoder, and one long row for the decoder."""
    batch, passages, length = source.shape
    flat = (batch * passages, length)
    states = model.encoder(input_ids=source.view(flat), attention_mask=mask.view(flat)).last_hidden_state
    joined = BaseModelOutput(last_hidden_state=states.view(batch, passages * length, -1))
    mask = mask.view(batch, passages * length)
    return model(encoder_outputs=joined, attention_mask=mask, labels=labels, use_cache=False).loss


def check(task: FusionTask, sides: Sides, batch: Batch, read: Mapping[str, Batch], dtype: str) -> None:
    """Checks that theirs, of each batch in `read`, has the same loss as ours without dropout."""
    ours = make_eval_step(task)(sides.params, {}, batch, jax.random.key(0))["loss"].value()
    for name, other in read.items():
        with torch.no_grad(), autocast(getattr(torch, dtype)):
            theirs = their_loss(sides.theirs.eval(), *to_torch(other))
        check_agreement(f"loss, {name}", ours, theirs.float().cpu().numpy(), tolerance=_TOLERANCE[dtype])


if __name__ == "__main__":
    keep_freed_memory()
    main()
