"""How to decode: every option, with what it means and what it takes."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from empax.core.config import ConfigError, check_numbers

Method = Literal["greedy", "beam", "sample"]

SimilarityLikelihood = Literal["normalised", "probability"]
"""How re-ranking by similarity counts the likelihood."""

LEAST_TEMPERATURE = 1e-4
"""Lower ones divide logits beyond float32; "greedy" is their limit."""

_MOST_TOKENS, _MOST_HYPOTHESES = 1_000_000, 10_000


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How to decode. Static: every combination compiles its own program.

    An option that is off costs nothing. `generation_config` reads them from a model's own folder. Names of
    transformers are in brackets where they differ.

    Attributes:
      method: "greedy", "beam" or "sample".
      max_tokens: most tokens of a response, the end-of-sequence token included (`max_new_tokens`).
      min_tokens: fewest tokens before the end-of-sequence token (`min_new_tokens`).
      num_beams: hypotheses kept by "beam".
      length_penalty: "beam" ranks by log-probability / length ** length_penalty; length counts the end token.
      early_stopping: True: "beam" stops once num_beams hypotheses have ended, even if a better one could still come.
        False: it stops once the best running hypothesis, at its present length, is no better than the worst of them.
        "never": once no running hypothesis can become better at any length.
      num_beam_groups: "beam" splits its hypotheses into so many groups, each of which searches for itself.
      diversity_penalty: at each step, how much a token's log-probability falls for each hypothesis of an earlier group
        that has just taken it.
      num_return_sequences: how many of its hypotheses "beam" returns; None = all.
      draw_beams: "beam" draws its continuations without replacement, by what "sample" reads, in place of taking the
        likeliest (`do_sample` beside `num_beams`).
      num_samples: independent responses drawn by "sample", the likeliest or what `rerank` prefers first.
      temperature: of "sample", at least LEAST_TEMPERATURE.
      top_k: of "sample": keeps the k likeliest tokens; 0 = all.
      top_p: of "sample": keeps the likeliest tokens that hold p of the probability; 1 = all.
      min_p: of "sample": keeps the tokens with at least this share of the likeliest one's probability; 0 = all.
      typical_p: of "sample": keeps the tokens whose information is nearest to its mean and that hold p of the
        probability; 1 = all.
      no_repeat_ngram: no n-gram of this size comes twice in a response; 0 = may repeat (`no_repeat_ngram_size`). As in
        Hugging Face's, the start token counts as the first token. A prompt counts where `generate` is given one.
      encoder_no_repeat_ngram: no n-gram of this size comes from the source; 0 = may come
        (`encoder_no_repeat_ngram_size`).
      repetition_penalty: divides the logit of a token that the response (with its prompt) holds if it is above 0, and
        multiplies it otherwise; 1 = off. "beam" applies it to log-probabilities, as Hugging Face does.
      encoder_repetition_penalty: the same for tokens of the source, the other way round: above 1 favours them.
      suppress_tokens: ids that never come.
      begin_suppress_tokens: ids that never come first, or never after `first_token`.
      allow_unknown: whether the token for unknown words may come, of a vocabulary of words (`data.words`).
      bad_words: sequences of ids that never come (`bad_words_ids`).
      more_eos_ids: ids that end a response beside the tokenizer's end-of-sequence token.
      first_token: what every response begins with (`forced_bos_token_id`, BART); None = anything.
      end_at_limit: the last of `max_tokens` must be the end-of-sequence token (`forced_eos_token_id`, BART).
      rerank: which of several hypotheses comes first (`decoding.rerank`; whoever decodes applies it): with "consensus"
        the one that the others agree with most, with "likelihood" the likeliest, with "similarity" a likely one whose
        encoding is near that of the context, with "random" any of them (a control); "" leaves the order of the
        search.
      rerank_length: "consensus" ranks by agreement * length ** rerank_length (ours, because agreement alone prefers
        short replies), "likelihood" by log-probability / length ** rerank_length.
      rerank_similarity: of "similarity": the share of the cosine, in [0, 1]; the likelihood has the rest.
      rerank_likelihood: of "similarity": "normalised" takes the mean log-probability of a token over the sum of all
        hypotheses', "probability" the probability of the whole.
      rerank_exemplars: how much agreement with the responses of the retrieved exemplars, on average, counts beside
        that with the other hypotheses; 0 = nothing. Ours.
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
    rerank: Literal["", "consensus", "likelihood", "random", "similarity"] = ""
    rerank_length: float = 0.0
    rerank_exemplars: float = 0.0
    rerank_similarity: float = 0.7
    rerank_likelihood: SimilarityLikelihood = "normalised"

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            allowed = ", ".join(map(repr, get_args(Method)))
            raise ConfigError(f"method = {self.method!r} is not allowed; it takes one of {allowed}.")
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
            more = {"greedy": "method = 'sample'", "beam": "num_beams", "sample": "num_samples"}[self.method]
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
            raise ConfigError(f"first_token = {self.first_token} is in suppress_tokens; take it out of one of them.")

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
                f"draw_beams with num_beam_groups = {self.num_beam_groups} is not here; set num_beam_groups to 1, or "
                "draw_beams to False."
            )
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise ConfigError(
                f"diversity_penalty = {self.diversity_penalty} has nothing to tell apart in one group; set "
                "num_beam_groups above 1, or diversity_penalty to 0."
            )

    @property
    def penalises(self) -> bool:
        """Whether repetition is penalised, in the response or from the source."""
        return self.repetition_penalty != 1.0 or self.encoder_repetition_penalty != 1.0

    @property
    def reads_source(self) -> bool:
        """Whether `generate` must be given the source's tokens."""
        return self.encoder_no_repeat_ngram > 0 or self.encoder_repetition_penalty != 1.0


def without_unknown(settings: DecodeSettings, unk_id: int | None) -> DecodeSettings:
    """The settings under which the token for unknown words, if there is one, never comes unless it is allowed."""
    if unk_id is None or settings.allow_unknown or unk_id in settings.suppress_tokens:
        return settings
    return dataclasses.replace(settings, suppress_tokens=(*settings.suppress_tokens, unk_id))


def num_hypotheses(settings: DecodeSettings) -> int:
    """K: how many hypotheses of each example the cache must be started with."""
    return {"greedy": 1, "beam": settings.num_beams, "sample": settings.num_samples}[settings.method]


def num_returned(settings: DecodeSettings) -> int:
    """How many hypotheses of each example `Generated` will hold."""
    asked = settings.num_return_sequences if settings.method == "beam" else None
    return num_hypotheses(settings) if asked is None else asked
