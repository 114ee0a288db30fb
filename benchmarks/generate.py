"""Generation by Fusion-in-Decoder with the sizes of T5-small: empax against `generate` of Hugging Face's T5.

Theirs decodes batches of 16 in file order, padded to the longest passage, as the published code does; ours sorts by
length and reads passages without padding (`decoding.passages`). Other rows answer one batch of 16 from the same arrays
on both sides: once as ours reads passages, and once with all the padding that theirs computes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutput

from benchmarks import texts
from benchmarks.paired import DisagreementError, Row, arguments, report, timed
from benchmarks.shapes import fields_of
from benchmarks.sides import Sides, on_device, random_model, use
from empax.core.memory import keep_freed_memory
from empax.data.sources import TaggedForm
from empax.decoding.passages import PassageReader
from empax.decoding.search import generate
from empax.decoding.settings import DecodeSettings, num_hypotheses
from empax.models.fusion_in_decoder import FusionInDecoder

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "what either side frees stays with the process for later (empax.core.memory), as in runs of empax.main",
    "the same random weights, the same passages, at most 30 tokens, the same search and its settings",
    "at least 99% of all answers must be the same tokens in float32, but for samples; how many are is reported",
    "from arrays of ids to arrays of ids; tokens are made before, and every shape is compiled before",
    "theirs: 16 examples a batch in the order of the file, padded to the longest passage of the batch",
    "ours: --batch examples, sorted by length, passages read by decoding.passages.PassageReader",
    "one padded batch: the first 16 examples, the same arrays on both sides; ours leaves their padding out",
    "one padded batch, padding read: ours encodes and attends to arrays of the same shapes as theirs",
)

Passages = list[list[tuple[texts.Text, texts.Text]]]
_THEIR_BATCH = 16


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=3, devices=True)
    texts.add_flag(parser)
    parser.add_argument("--shape", choices=("t5-small", "t5-base"), default="t5-small", help="(t5-small)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the arithmetic (float32)"
    )
    parser.add_argument(
        "--padded", action="store_true", help="measure only one batch of --batch, reading all of its padding"
    )
    parser.add_argument("--items", type=int, default=512, help="number of test items, from the first (512)")
    parser.add_argument("--passages", type=int, default=6, help="K (6)")
    parser.add_argument("--batch", type=int, default=32, help="examples in one call of ours (32)")
    parser.add_argument("--max-passage", type=int, default=200, help="maximum tokens of a passage (200)")
    parser.add_argument("--tokens", type=int, default=30, help="maximum tokens of an answer (30)")
    parser.add_argument("--unroll", type=int, default=6, help="layers in one turn of our scan (6)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.items, options.passages, options.batch, options.rounds, options.unroll = 4, 2, 2, 1, 1
        options.max_passage, options.tokens = 24, 5
    vocab = {"vocab_size": 400} if options.smoke else {}
    use(options.device)
    fields = fields_of(options.shape, small=options.smoke, **vocab)
    sides = random_model(fields, dtype=options.dtype, unroll=options.unroll)
    sides.theirs.to(getattr(torch, options.dtype))
    on_device(options.device, sides.theirs)
    form, rows = passages_of(options, fields["vocab_size"])
    measured: dict[str, Row] = {}
    searches = {
        "greedy": DecodeSettings(method="greedy", max_tokens=options.tokens),
        "beam 4": DecodeSettings(method="beam", num_beams=4, max_tokens=options.tokens),
    }
    if options.padded:
        searches["sample"] = DecodeSettings(method="sample", top_k=20, temperature=0.9, max_tokens=options.tokens)
    for name, settings in searches.items():
        search = Search(sides, settings)
        least = 0.99 if options.dtype == "float32" and name != "sample" else 0.0
        if options.padded:
            some = rows[: options.batch]
            arrays = texts.passage_arrays(form, some, longest(some, options.max_passage))
            ours, theirs = (functools.partial(side, *arrays) for side in (search.ours_padded, search.theirs))
            ours(), theirs()
            facts = {"passage_tokens": arrays[0].shape[2]}
            key = f"{name}, one padded batch, padding read"
            measured[key] = measure(ours, theirs, len(some), options.rounds, facts, least)
            continue
        ours, theirs = our_answers(search, form, rows, options), their_answers(search, form, rows, options)
        first = texts.passage_arrays(form, rows[:_THEIR_BATCH], longest(rows[:_THEIR_BATCH], options.max_passage))
        one = [functools.partial(side, *first) for side in (search.ours, search.ours_padded, search.theirs)]
        for warm in (ours, *one):  # compiles every shape; theirs needs one batch
            warm()
        facts = {"passage_tokens": first[0].shape[2]}
        packed, padded, other = one
        measured[f"{name}, one padded batch"] = measure(packed, other, len(first[0]), options.rounds, facts, least)
        measured[f"{name}, one padded batch, padding read"] = measure(
            padded, other, len(first[0]), options.rounds, facts, least
        )
        facts = {"cross_attention_bytes": search.cross_attention_bytes()}
        measured[name] = measure(ours, theirs, len(rows), options.rounds, facts, least)
    sizes = f"{texts.name_of(options.data)}, {len(rows)} test items; K = {options.passages}"
    return report("generate", measured, (*HELD_EQUAL, sizes), smoke=options.smoke, device=options.device)


def passages_of(options: argparse.Namespace, vocab_size: int) -> tuple[TaggedForm, Passages]:
    train = texts.instances(options.data, "train")
    rng = np.random.default_rng(0)
    corpus = [train[i] for i in rng.permutation(len(train))[:4096]]
    form = texts.joined_form(texts.tokenizer_of(train, vocab_size), options.max_passage)
    chosen = texts.instances(options.data, "test")[: options.items]
    return form, texts.with_exemplars(form, chosen, corpus, options.passages, rng)


def longest(rows: Passages, limit: int) -> int:
    return max(texts.passage_tokens(row, limit) for row in rows)


def measure(
    ours: Callable[[], Sequence[np.ndarray]],
    theirs: Callable[[], Sequence[np.ndarray]],
    count: int,
    rounds: int,
    facts: dict[str, Any],
    least: float,
) -> Row:
    """Measures examples per second of both sides; at least a share `least` of their last answers must agree."""
    answers: dict[str, Sequence[np.ndarray]] = {}
    took = timed(lambda: answers.update(ours=ours()), lambda: answers.update(theirs=theirs()), rounds, warm=True)
    same = agreement(answers["ours"], answers["theirs"], least)
    return Row.of_rates(took, count, "examples/s", **facts, same_answers=same)


class Search:
    """One search on both sides."""

    def __init__(self, sides: Sides, settings: DecodeSettings):
        self.model, self.params, self.their_model = FusionInDecoder(sides.model), sides.params, sides.theirs
        self.settings, config = settings, sides.theirs.config
        self.ids = {
            "eos_id": config.eos_token_id, "pad_id": config.pad_token_id, "start_id": config.decoder_start_token_id,
        }  # fmt: skip
        self._read = PassageReader(self.model)
        self._search = jax.jit(self._tokens)
        self._search_padded = jax.jit(self._tokens_of_padded)

    def _cache(self, params: Any, states: Any, mask: Any) -> Any:
        call = functools.partial(self.model.apply, {"params": params})
        num, length = num_hypotheses(self.settings), self.settings.max_tokens
        return call(states, mask, num_hypotheses=num, max_length=length, method="start_cache")

    def _tokens(self, params: Any, states: Any, mask: Any) -> Any:
        return generate(
            lambda tokens, cache: self.model.apply({"params": params}, tokens, cache, method="step"),
            self._cache(params, states, mask),
            batch_size=states.shape[0],
            settings=self.settings,
            rng=jax.random.key(0),
            **self.ids,
        ).tokens[:, 0]

    def _tokens_of_padded(self, params: Any, source: Any, mask: Any) -> Any:
        states = self.model.apply({"params": params}, source, mask, method="encode")
        return self._tokens(params, states, self.model.states_mask(mask))

    def ours(self, source: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.asarray(self._search(self.params, *self._read(self.params, source, mask)))

    def ours_padded(self, source: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.asarray(self._search_padded(self.params, source, mask))

    def theirs(self, source: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Generates with the usual reshape: passages are rows for the encoder, and one long row for the decoder."""
        ids, real = torch.tensor(source).long(), torch.tensor(mask).long()
        rows, passages, length = ids.shape
        with torch.inference_mode():
            flat = (rows * passages, length)
            states = self.their_model.encoder(input_ids=ids.view(flat), attention_mask=real.view(flat))[0]
            made = self.their_model.generate(
                encoder_outputs=BaseModelOutput(last_hidden_state=states.view(rows, passages * length, -1)),
                attention_mask=real.view(rows, -1),
                max_new_tokens=self.settings.max_tokens,
                num_beams=self.settings.num_beams if self.settings.method == "beam" else 1,
                do_sample=self.settings.method == "sample",
                **({"top_k": 20, "temperature": 0.9} if self.settings.method == "sample" else {}),
            )
        return made[:, 1:].cpu().numpy()

    def cross_attention_bytes(self) -> int:
        """Returns the bytes for a batch of 16 with passages of 100 tokens, independent of the number of beams."""
        shape = (_THEIR_BATCH, 600)
        states = jax.ShapeDtypeStruct((*shape, self.model.config.d_model), np.float32)
        cache = jax.eval_shape(self._cache, self.params, states, jax.ShapeDtypeStruct(shape, bool))
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.cross))


def our_answers(
    search: Search, form: TaggedForm, rows: Passages, options: argparse.Namespace
) -> Callable[[], list[np.ndarray]]:
    sizes = np.array([sum(texts.passage_tokens([one], options.max_passage) for one in row) for row in rows])
    order = np.argsort(-sizes, kind="stable")
    batches = []
    for start in range(0, len(order), options.batch):
        picked = order[start : start + options.batch]
        filled = np.resize(picked, options.batch)  # the last batch too, so that one shape is compiled once
        batches.append((picked, texts.passage_arrays(form, [rows[i] for i in filled], options.max_passage)))

    def run() -> list[np.ndarray]:
        found: list[np.ndarray] = [np.zeros(0)] * len(rows)
        for picked, arrays in batches:
            for i, answer in zip(picked, search.ours(*arrays), strict=False):
                found[i] = answer
        return found

    return run


def their_answers(
    search: Search, form: TaggedForm, rows: Passages, options: argparse.Namespace
) -> Callable[[], list[np.ndarray]]:
    parts = [rows[start : start + _THEIR_BATCH] for start in range(0, len(rows), _THEIR_BATCH)]
    batches = [texts.passage_arrays(form, part, longest(part, options.max_passage)) for part in parts]

    def run() -> list[np.ndarray]:
        return [answer for arrays in batches for answer in search.theirs(*arrays)]

    return run


def agreement(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], least: float) -> float:
    """Returns the share of answers with the same tokens.

    Raises:
      DisagreementError: the share is below `least`.
    """

    def same(one: np.ndarray, other: np.ndarray) -> bool:
        size = max(len(one), len(other))
        padded = [np.pad(tokens, (0, size - len(tokens))) for tokens in (one, other)]  # both pad with 0
        return bool(np.array_equal(*padded))

    share = float(np.mean([same(one, other) for one, other in zip(ours, theirs, strict=True)]))
    if share < least:
        raise DisagreementError(f"only {share:.1%} of the answers are the same.")
    return round(share, 4)


if __name__ == "__main__":
    keep_freed_memory()
    main()
