"""Answers to texts: encoding, decoding with a cache as small as the answers allow, and detokenization."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.types import Batch, Generated, Instance, Params
from empax.data.exemplars import ContextExamples
from empax.data.sources import LayoutSettings, PlainForm
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.generation_config import LENGTHS, options_that_can_be_had
from empax.decoding.hypotheses import Limits
from empax.decoding.options import Call, call_of
from empax.decoding.sampling import Randomness
from empax.decoding.settings import DecodeSettings, without_unknown
from empax.interop.export import Generation
from empax.interop.pretrained import most_tokens
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import EMOTION_HEAD
from empax.models.prompted import PromptedDecoder
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator, Reader
from empax.serving.pairs import LEAST_LENGTH, batches_of, check_whole

MAX_TOKENS = 64
"""Maximum length of a reply if the model's folder does not say."""

_ROOM = 256
"""Size of the first cache, in tokens."""
_ENDLESS = 10**6


class Likelihoods(NamedTuple):
    """Negative log-likelihoods of targets given their sources, in nats, with the end of the text; and their tokens."""

    nll: Float[np.ndarray, " N"]
    num_tokens: Int[np.ndarray, " N"]

    @property
    def perplexity(self) -> float:
        """Perplexity per token over all targets; NaN if there are none."""
        return float(np.exp(self.nll.sum() / self.num_tokens.sum())) if len(self.nll) else math.nan


@dataclasses.dataclass(frozen=True)
class TextGenerator:
    """A generator with its tokenizer: converts options to decoding settings, texts to batches, and ids to texts.

    Its fields are those of `text_model.TextModel`.
    """

    model: EncoderDecoder | DecoderOnly
    params: Params
    tokenizer: SubwordTokenizer
    decoding: DecodeSettings | Mapping[str, Any]
    source: str

    def call(self, options: Mapping[str, Any]) -> Call:
        """Returns the decoding settings of a `TextModel.generate` call with these options.

        Raises:
          ConfigError: an option is unknown or would change nothing.
        """
        model, t = self.model, self.tokenizer
        known = {"encoder_decoder": isinstance(model, EncoderDecoder), "eos_id": t.eos_id}
        known["vocab_size"] = model.config.vocab_size
        if isinstance(self.decoding, DecodeSettings):
            own, fields = self.decoding, self.generation().fields()
        else:
            own, fields = DecodeSettings(), self.decoding
        kept, _ = options_that_can_be_had(fields, **known)
        return call_of(options, kept, own=own, **known)

    def reply_call(self, options: Mapping[str, Any]) -> Call:
        """As `call`, but without a length here or in the model's folder a reply has at most `MAX_TOKENS`."""
        asked = any(options.get(name) is not None for name in ("max_tokens", *LENGTHS[:2]))
        own = isinstance(self.decoding, DecodeSettings) or any(self.decoding.get(name) for name in LENGTHS[:2])
        if asked or own:
            return self.call(options)
        most = most_tokens(self.model)
        given = {name: value for name, value in options.items() if name != "max_tokens"}
        return self.call({**given, "max_new_tokens": MAX_TOKENS if most is None else min(MAX_TOKENS, most // 2)})

    def generation(self) -> Generation:
        """Returns the decoding settings of an export of the model."""
        t, own = self.tokenizer, self.decoding
        start_id = self.model.config.start_id if isinstance(self.model, EncoderDecoder) else t.start_id
        if isinstance(own, DecodeSettings):
            decoding = without_unknown(own, t.unk_id)
            return Generation(dataclasses.asdict(decoding), start_id, t.eos_id, t.pad_id)
        return Generation({}, start_id, t.eos_id, t.pad_id, written=own)

    def said(self, text: str, ids: list[int]) -> str:
        """Returns the answer of `ids` to a conversation that ends in `text`."""
        if isinstance(self.model, DecoderOnly) and not self.tokenizer.chat_template:
            return self.tokenizer.continuation(text, ids)
        return self.tokenizer.decode(ids)

    def task(
        self, settings: DecodeSettings, *, eos_id: int | None = None, start_id: int | None = None, replies: bool = False
    ) -> Generator:
        """Returns the generator for training and decoding; None = the ids of the tokenizer and the model.

        `replies`: options of repetition do not count the turns of a chat before the answer.
        """
        model, t = self.model, self.tokenizer
        settings = without_unknown(settings, t.unk_id)
        if isinstance(model, DecoderOnly):
            reader: Reader = PromptedDecoder(model.clone(rows_fit=True))  # `check_lengths` ensures it
            start_id = None
        else:
            reader, start_id = model, model.config.start_id if start_id is None else start_id
        counts = not (replies and t.chat_template)
        decoder = Decoder(settings, start_id, t.eos_id if eos_id is None else eos_id, t.pad_id, counts)
        return Generator(reader, decoder, EMOTION_HEAD, emotion_weight=0.0, heads=())

    def examples(
        self,
        pairs: Sequence[tuple[str | tuple[str, ...], str]],
        *,
        answer: Call | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> ContextExamples:
        """Returns texts, or turns of a conversation, with their answers as examples for training and decoding.

        `lengths` are those of `LayoutSettings`; without them, nothing is truncated.

        Raises:
          ConfigError: a text, with its answer in a decoder-only model, has more tokens than the model has positions, or
            than `answer` has room for.
        """
        prompted = isinstance(self.model, DecoderOnly)
        layout = LayoutSettings(**{"max_context_tokens": _ENDLESS, "max_target_tokens": _ENDLESS, **(lengths or {})})
        template, first_token = self.tokenizer.chat_template, self.call({}).settings.first_token
        form = PlainForm(self.tokenizer, layout, template if prompted else None, first_token)
        instances = [
            Instance(f"{i}#2", (source,) if isinstance(source, str) else source, target, "")
            for i, (source, target) in enumerate(pairs)
        ]
        examples, most = ContextExamples(instances, form), most_tokens(self.model)
        sources, targets = examples.lengths.T
        if answer is not None:
            targets = answer.most_tokens(sources)
            for number in np.flatnonzero(targets < 1):
                raise ConfigError(
                    f"text {number} has {sources[number]} tokens, and max_length = {answer.settings.max_tokens} covers "
                    "the answer as well; raise max_length, or give max_new_tokens instead."
                )
        # A prompt and its answer share one sequence of positions; an encoder-decoder has one for each.
        check_lengths(self.model, self.source, sources + targets if prompted else sources)
        if most is not None and not prompted:
            of = "the target of text" if answer is None else "the answer to text"
            check_lengths(self.model, self.source, targets, of=of)
            examples.max_target_tokens = min(examples.max_target_tokens, most)  # no padding beyond the positions
        return examples

    def answers(
        self,
        contexts: Sequence[tuple[str, ...]],
        call: Call,
        *,
        batch_size: int,
        seed: int,
        max_tokens: int | None = None,
        least: int = LEAST_LENGTH,
        replies: bool = False,
    ) -> list[str]:
        """Returns `call.num_texts` consecutive answers to each context.

        Contexts are truncated to `max_tokens` and padded to at least `least`, so that few programs are compiled.
        `replies` as in `task`.
        """
        check_whole("seed", seed, least=0)
        task = self.task(call.settings, eos_id=call.eos_id, start_id=call.start_id, replies=replies)
        if not contexts:
            return []
        lengths = None if max_tokens is None else {"max_context_tokens": max_tokens}
        examples = self.examples([(context, "") for context in contexts], answer=call, lengths=lengths)
        answers: list[list[str]] = [[] for _ in contexts]
        batches = batches_of(examples, batch_size, most=most_tokens(self.model), least=least)
        for number, (rows, batch) in enumerate(batches):
            rng = jax.random.fold_in(jax.random.key(seed), number)
            fewest, most = call.limits(np.where(rows < 0, 1, examples.lengths[rows, 0]))
            most = np.where(rows < 0, 1, most)  # nobody waits for a padding row
            limits = np.minimum(fewest, most), most
            found = answers_of(task, {"model": self.params}, batch, rng, limits, rows >= 0)
            for row, several in zip(rows, found, strict=True):
                if row >= 0:
                    answers[row] = [self.said(contexts[row][-1], ids.tolist()) for ids in several[: call.num_texts]]
        return [answer for several in answers for answer in several]

    def nll(self, pairs: Sequence[tuple[str, str]], *, batch_size: int) -> Likelihoods:
        """Returns the likelihood of each target given its source.

        Raises:
          ConfigError: a text is too long.
        """
        task, examples = self.task(DecodeSettings()), self.examples(pairs)
        nll, num_tokens = np.zeros(len(examples)), np.zeros(len(examples), np.int64)
        for rows, batch in batches_of(examples, batch_size, most=most_tokens(self.model)):
            found, sizes = _read(task, self.params, batch)
            kept = rows >= 0
            nll[rows[kept]], num_tokens[rows[kept]] = np.asarray(found)[kept], np.asarray(sizes)[kept]
        return Likelihoods(nll, num_tokens)


def check_lengths(
    model: EncoderDecoder | DecoderOnly | DualEncoder,
    source: str,
    tokens: Sequence[int] | Int[np.ndarray, " N"],
    *,
    of: str = "text",
) -> None:
    """Raises ConfigError if one of `tokens[N]` is more than the positions of the model from `source`."""
    most = most_tokens(model)
    for number, length in enumerate(tokens):
        if most is not None and length > most:
            answer = ", its answer included" if isinstance(model, DecoderOnly) else ""
            raise ConfigError(f"{of} {number} takes {length} positions{answer}; {source} has {most}: shorten it.")


def answers_of(
    task: Generator,
    params: Params,
    batch: Batch,
    rng: Randomness,
    limits: tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]],
    real: Bool[np.ndarray, " B"],
) -> Int[np.ndarray, "B K T"]:
    """Returns hypotheses, decoded with a small cache that is doubled until all hypotheses of real rows have ended.

    A folder may allow thousands of tokens, but most answers are short. A beam is searched only once, since its result
    depends on the maximum length.
    """
    settings = task.decoder.settings
    room = settings.max_tokens
    if settings.method != "beam":
        room = min(room, max(_ROOM, settings.min_tokens))
    while True:
        decoder = dataclasses.replace(task.decoder, settings=dataclasses.replace(settings, max_tokens=room))
        found = np.asarray(_generate(dataclasses.replace(task, decoder=decoder), params, batch, rng, limits).tokens)
        ended = np.isin(found, decoder.eos_ids).any(axis=2) | (limits[1] <= room)[:, None]
        if room == settings.max_tokens or ended[real].all():
            return found
        room = min(2 * room, settings.max_tokens)


@functools.partial(jax.jit, static_argnums=0)
def _generate(task: Generator, params: Params, batch: Batch, rng: Randomness, limits: Limits) -> Generated:
    return task.decoder(task.model, params["model"], batch.source, batch.source_mask, rng, limits=limits)


@functools.partial(jax.jit, static_argnums=0)
def _read(task: Generator, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    own = {"model": params}
    found = task.nll(own, batch, task.encode(own, batch, None))
    return found["nll"], found["num_tokens"]
