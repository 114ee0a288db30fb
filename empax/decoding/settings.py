"""Settings of decoding, with their meaning and their allowed values."""

from __future__ import annotations

import dataclasses
from typing import Literal

from empax.core.config import ConfigError, check_numbers

Method = Literal["greedy", "beam", "sample"]

SimilarityLikelihood = Literal["normalised", "probability"]
"""How re-ranking by similarity measures likelihood."""

LEAST_TEMPERATURE = 1e-4
"""Lower temperatures scale logits beyond float32; "greedy" is their limit."""

_MOST_TOKENS, _MOST_HYPOTHESES = 1_000_000, 10_000


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """Settings of decoding. They are static: every combination compiles its own program.

    An option that is off costs nothing. `generation_config` reads these settings from a model's own folder. Names of
    transformers are in brackets where they differ.

    Attributes:
      method: "greedy", "beam" or "sample".
      max_tokens: most tokens of a response, the end-of-sequence token included (`max_new_tokens`).
      min_tokens: fewest tokens before the end-of-sequence token (`min_new_tokens`).
      num_beams: hypotheses kept by "beam".
      length_penalty: "beam" ranks by log-probability / length ** length_penalty; length counts the end token.
      early_stopping: True: "beam" stops once num_beams hypotheses have ended, even if a better one is still possible.
        False: it stops once the best running hypothesis, at its present length, is no better than the worst of them.
        "never": it stops once no running hypothesis can become better at any length.
      num_beam_groups: number of groups of "beam", each with its share of the hypotheses and its own search.
      diversity_penalty: decrease of a token's log-probability for each hypothesis of an earlier group that has just
        chosen it.
      num_return_sequences: number of hypotheses that "beam" returns; None = all.
      draw_beams: "beam" draws its continuations without replacement, with the options of "sample", instead of taking
        the likeliest (`do_sample` with `num_beams`).
      num_samples: independent responses drawn by "sample"; the first is the likeliest, or the best by `rerank`.
      temperature: temperature of "sample", at least LEAST_TEMPERATURE.
      top_k: "sample" keeps the k likeliest tokens; 0 = all.
      top_p: "sample" keeps the likeliest tokens with a total probability of p; 1 = all.
      min_p: "sample" keeps the tokens with at least this share of the largest probability; 0 = all.
      typical_p: "sample" keeps the tokens whose information is nearest to its mean, with a total probability of p;
        1 = all.
      no_repeat_ngram: no n-gram of this size occurs twice in a response; 0 = off (`no_repeat_ngram_size`). As in
        Hugging Face, the start token counts as the first token. A prompt counts, but not the turns of a chat before its
        reply: they all begin and end alike.
      encoder_no_repeat_ngram: no n-gram of this size is copied from the source; 0 = off
        (`encoder_no_repeat_ngram_size`).
      repetition_penalty: divides the logit of a token of the response (with a prompt that counts, see
        `no_repeat_ngram`) if it is above 0, and multiplies it otherwise; 1 = off. "beam" applies it to
        log-probabilities, as Hugging Face does.
      encoder_repetition_penalty: the inverse for tokens of the source: values above 1 favour them; 1 = off.
      suppress_tokens: ids that are never generated.
      begin_suppress_tokens: ids that are never generated first, or directly after `first_token` if that is set.
      allow_unknown: whether the unknown-word token of a word vocabulary (`data.words`) may be generated.
      bad_words: sequences of ids that are never generated (`bad_words_ids`).
      more_eos_ids: ids that end a response in addition to the tokenizer's end-of-sequence token.
      first_token: first token of every response (`forced_bos_token_id`, BART); None = any.
      end_at_limit: the last of `max_tokens` must be the end-of-sequence token (`forced_eos_token_id`, BART).
      rerank: rule that puts one of several hypotheses first (`decoding.rerank`; applied by the caller of the search):
        "consensus" the one that agrees most with the others (one cut at max_tokens only if all are), "similarity" a
        likely one whose encoding is near that of the context, "random" any of them (a control); "" keeps the order of
        the search.
      rerank_length: "consensus" ranks by agreement * length ** rerank_length (ours, since agreement alone prefers short
        replies).
      rerank_similarity: weight of the cosine in "similarity", in [0, 1]; the likelihood has the rest.
      rerank_likelihood: likelihood in "similarity": "normalised" is the mean token log-probability divided by the sum
        of its absolute values over all hypotheses, "probability" the probability of the response.
      rerank_exemplars: weight of the mean agreement with the responses of the retrieved exemplars, relative to that
        with the other hypotheses; 0 = none. Ours.
    """

    method: Method = "greedy"
    max_tokens: int = 30
    min_tokens: int = 0
    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    num_return_sequences: int | None = None
    draw_beams: bool = False
    num_samples: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    no_repeat_ngram: int = 0
    encoder_no_repeat_ngram: int = 0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    allow_unknown: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    more_eos_ids: tuple[int, ...] = ()
    first_token: int | None = None
    end_at_limit: bool = False
    rerank: Literal["", "consensus", "random", "similarity"] = ""
    rerank_length: float = 0.0
    rerank_exemplars: float = 0.0
    rerank_similarity: float = 0.7
    rerank_likelihood: SimilarityLikelihood = "normalised"

    def __post_init__(self) -> None:
        check_numbers(self, "max_tokens", least=1, most=_MOST_TOKENS)
        check_numbers(self, "min_tokens", least=0, most=self.max_tokens)
        check_numbers(self, "num_beams", "num_samples", least=1, most=_MOST_HYPOTHESES)
        check_numbers(self, "top_k", "no_repeat_ngram", "encoder_no_repeat_ngram", "first_token", least=0)
        check_numbers(self, "rerank_exemplars", least=0)
        check_numbers(self, "rerank_similarity", least=0, most=1)
        check_numbers(self, "length_penalty", "rerank_length", least=-10, most=10)
        check_numbers(self, "temperature", least=LEAST_TEMPERATURE, hint="'greedy' takes the likeliest token")
        check_numbers(self, "top_p", "typical_p", above=0, most=1)
        check_numbers(self, "min_p", least=0, most=1)
        check_numbers(self, "repetition_penalty", "encoder_repetition_penalty", above=0, most=1e4)
        self._check_ids()
        self._check_beams()
        if self.rerank and num_returned(self) < 2:
            width = "num_return_sequences" if num_hypotheses(self) > 1 else "num_beams"
            more = {"greedy": "method = 'sample'", "beam": width, "sample": "num_samples"}[self.method]
            raise ConfigError(f"rerank = {self.rerank!r} is not allowed with one hypothesis; set {more}.")
        if self.rerank_exemplars and self.rerank != "consensus":
            raise ConfigError(
                f"rerank_exemplars = {self.rerank_exemplars} is not allowed without rerank = 'consensus'."
            )

    def _check_ids(self) -> None:
        for name in ("suppress_tokens", "begin_suppress_tokens", "more_eos_ids"):
            if any(token < 0 for token in getattr(self, name)):
                raise ConfigError(f"{name} = {getattr(self, name)} must hold token ids, which are at least 0.")
        if any(not word or any(token < 0 for token in word) for word in self.bad_words):
            raise ConfigError(f"bad_words = {self.bad_words} must hold sequences of at least one id, each at least 0.")
        if self.first_token is not None and self.first_token in self.suppress_tokens:
            raise ConfigError(f"first_token = {self.first_token} is in suppress_tokens; remove it from one of them.")

    def _check_beams(self) -> None:
        check_numbers(self, "num_beam_groups", "num_return_sequences", least=1)
        check_numbers(self, "diversity_penalty", least=0, most=1e4)
        if self.method != "beam":
            return
        check_numbers(self, "num_return_sequences", least=1, most=self.num_beams)
        if self.num_beams % self.num_beam_groups:
            raise ConfigError(
                f"num_beam_groups = {self.num_beam_groups} must divide num_beams = {self.num_beams}; change either."
            )
        if self.draw_beams and self.num_beam_groups > 1:
            raise ConfigError(
                f"draw_beams with num_beam_groups = {self.num_beam_groups} is not supported; set num_beam_groups to 1, "
                "or draw_beams to False."
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ConfigError(
                f"diversity_penalty = {self.diversity_penalty} has no effect with one group; set "
                "num_beam_groups above 1, or diversity_penalty to 0."
            )

    @property
    def penalises(self) -> bool:
        """Whether repetition is penalised, in the response or from the source."""
        return self.repetition_penalty != 1.0 or self.encoder_repetition_penalty != 1.0

    @property
    def reads_source(self) -> bool:
        """Whether `generate` needs the tokens of the source."""
        return self.encoder_no_repeat_ngram > 0 or self.encoder_repetition_penalty != 1.0


def without_unknown(settings: DecodeSettings, unk_id: int | None) -> DecodeSettings:
    """Returns settings that suppress the unknown-word token, if there is one, unless `allow_unknown` is set."""
    if unk_id is None or settings.allow_unknown or unk_id in settings.suppress_tokens:
        return settings
    return dataclasses.replace(settings, suppress_tokens=(*settings.suppress_tokens, unk_id))


def num_hypotheses(settings: DecodeSettings) -> int:
    """Returns K, the number of hypotheses per example for which the cache must be started."""
    return {"greedy": 1, "beam": settings.num_beams, "sample": settings.num_samples}[settings.method]


def num_returned(settings: DecodeSettings) -> int:
    """Returns the number of hypotheses per example in `Generated`."""
    asked = settings.num_return_sequences if settings.method == "beam" else None
    return num_hypotheses(settings) if asked is None else asked
