"""Decoding of a generator: search from its states, and reranking of the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from empax.core.protocols import Tokenizer
from empax.core.types import Generated, Params
from empax.decoding.hypotheses import Limits
from empax.decoding.rerank import Hypotheses, make_reranker, rerank
from empax.decoding.sampling import Randomness, folded
from empax.decoding.search import Search, Tokens, search_of
from empax.decoding.settings import DecodeSettings, num_hypotheses, without_unknown
from empax.evaluation.device_metrics import utility
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import masked_mean
from empax.models.prompted import FusionInPrompt, PromptedDecoder, pooled_states


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes ids from a generator's states: start and end ids, and the search.

    Attributes:
      start_id: start token of responses; None = the last token of each prompt, which the states have.
      counts_prompt: whether such a prompt counts for options of repetition, as in transformers. False for a chat: its
        turns all begin and end with the same tokens, so no reply could begin or end like an earlier turn.
    """

    settings: DecodeSettings
    start_id: int | None
    eos_id: int
    pad_id: int
    counts_prompt: bool = True

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """All ids that end a response."""
        return (self.eos_id, *self.settings.more_eos_ids)

    def made(self, tokens: Int[Array, "*B"]) -> Bool[Array, "*B"]:
        """Returns the mask of the tokens of a response, without its end and the padding behind it."""
        return ~jnp.isin(tokens, jnp.array((*self.eos_ids, self.pad_id)))

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: DecodeSettings) -> Decoder:
        """Builds a decoder with the ids of `tokenizer`, which never generates the unknown word."""
        decoding = without_unknown(settings, tokenizer.unk_id)
        return cls(decoding, tokenizer.start_id, tokenizer.eos_id, tokenizer.pad_id)

    def __call__(
        self,
        model: Any,
        params: Params,
        source: Int[Array, "..."],
        mask: Bool[Array, "..."],
        rng: Randomness,
        *,
        limits: Limits | None = None,
    ) -> Generated:
        """Decodes from `source` with `model`, a Reader ([B, S]) or a Fusion ([B, K, S]).

        `limits` as in `decoding.search.generate`.
        """
        states = model.apply({"params": params}, source, mask, method="encode", deterministic=True)
        return self.from_states(model, params, states, mask, rng, limits=limits, **self.looked_at(source, mask))

    def looked_at(self, source: Int[Array, "..."], mask: Bool[Array, "..."]) -> dict[str, Any]:
        """Returns `source` and `prompt` of `decoding.search.search_of`."""
        read = (source, mask) if self.settings.reads_source else None
        # A prompt whose last token starts the response forms one text with it; an instruction around it would not.
        return {"source": read, "prompt": (source, mask) if self.start_id is None and self.counts_prompt else None}

    def search(
        self, model: Any, params: Params, rng: Randomness, start: int | Int[Array, " B"], size: int, **more: Any
    ) -> Search:
        """Builds the search for responses of `model` after `start`, in batches of `size`; `more` is for `search_of`."""
        return search_of(
            lambda tokens, cache: model.apply({"params": params}, tokens, cache, method="step"),
            batch_size=size,
            start_id=start,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            settings=self.settings,
            rng=rng,
            **more,
        )

    def cache(self, model: Any, params: Params, states: Any, mask: Bool[Array, "..."], **beside: Any) -> Any:
        """Returns the cache for `Search.begin`."""
        return model.apply(
            {"params": params},
            states,
            mask,
            num_hypotheses=num_hypotheses(self.settings),
            max_length=self.settings.max_tokens,
            method="start_cache",
            **beside,
        )

    def start_of(self, states: Any) -> int | Int[Array, " B"]:
        """Returns the start token of responses."""
        return states.start if self.start_id is None else self.start_id

    def from_states(
        self,
        model: Any,
        params: Params,
        states: Any,
        mask: Bool[Array, "..."],
        rng: Randomness,
        *,
        exemplars: tuple[Int[Array, "B K T"], Bool[Array, "B K T"]] | None = None,
        source: Tokens | None = None,
        prompt: Tokens | None = None,
        beside: Mapping[str, Any] | None = None,
        compared: tuple[Callable[[], Any], Callable[[Any, Any], Any]] | None = None,
        limits: Limits | None = None,
    ) -> Generated:
        """Decodes from the encoder states of `model`; options that read texts get `source` and `prompt`.

        `beside` has further arguments of the model's `start_cache`: `memories`, `start`. `compared` has the encodings
        for reranking by similarity, `encoding` and `encode` of `Hypotheses`; None = means of encoder states.
        """
        cache = self.cache(model, params, states, mask, **(beside or {}))
        looked_at = {"source": source, "prompt": prompt, "limits": limits}
        search = self.search(model, params, rng, self.start_of(states), mask.shape[0], **looked_at)
        found = search.found(search.go_on(search.begin(cache)))
        reranker = make_reranker(self.settings, utility)
        if reranker is None:
            return found

        reader = model
        if isinstance(model, FusionInPrompt):  # a hypothesis is a single text, without exemplars
            reader = PromptedDecoder(model.model, model.prefix, model.start_id)

        def encode(ids: Int[Array, "N T"], mask: Bool[Array, "N T"]) -> Float[Array, "N D"]:
            if isinstance(model, FusionInDecoder):  # a single passage
                ids, mask = ids[:, None], mask[:, None]
            return pool(reader.apply({"params": params}, ids, mask, method="encode", deterministic=True), mask)

        def pool(states: Any, mask: Bool[Array, "..."]) -> Float[Array, "N D"]:
            return masked_mean(pooled_states(states), model.states_mask(mask))

        compared = compared or ((lambda: pool(states, mask)), encode)
        drawn = folded(rng, self.settings.max_tokens)  # the search folds in each position below it
        made, ended = self.made(found.tokens), jnp.isin(found.tokens, jnp.array(self.eos_ids)).any(axis=2)
        if self.settings.end_at_limit:  # an end at the limit is forced
            most = self.settings.max_tokens if limits is None else limits[1][:, None]
            ended &= made.sum(axis=2) < most - 1
        hypotheses = Hypotheses(found.tokens, made, found.log_probs, *compared, drawn, exemplars, ended)
        return rerank(found, reranker(hypotheses))
