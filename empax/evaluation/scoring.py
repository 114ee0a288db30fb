"""All metrics of a set of predictions, with intervals: used by reports and the command line."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from empax.core.config import check_numbers
from empax.core.files import DataError
from empax.core.plugins import load_function
from empax.core.text_functions import call_on_texts, can_be_tried
from empax.core.types import LEVELS, MECHANISMS, Prediction
from empax.evaluation import empathy, text, words
from empax.evaluation.normalisation import MOEL_METRICS
from empax.evaluation.pairing import describe_rows, dialogues_of, replies_and_references
from empax.evaluation.perplexity import perplexity_statistics
from empax.evaluation.significance import Interval, confidence_intervals
from empax.evaluation.statistics import Statistic, estimate, mean_statistic, ratio_statistic

METRICS: tuple[str, ...] = (
    "perplexity", "perplexity_per_word", "bits_per_byte",
    "bleu_1", "bleu_2", "bleu_3", "bleu_4", "bleu_2_precision", "brevity_penalty", "length_ratio",
    "rouge_l", "distinct_1", "distinct_2",
    "emotion_accuracy", "intent_accuracy",
    "empathy_f1", "emotional_reaction_f1", "interpretation_f1", "exploration_f1",
    "sentiment_mae", "sentence_std", "top5_share", "exemplar_emotion_match",
    "bart_score_faithfulness", "bart_score_precision", "bart_score_recall",
)  # fmt: skip
"""All metrics of a report, in order."""

LOWER_IS_BETTER: frozenset[str] = frozenset(
    {"perplexity", "perplexity_per_word", "bits_per_byte", "sentiment_mae", "sentence_std", "top5_share"}
)

JUDGES: tuple[str, ...] = ("second_seed", "linear")
"""Judges of the mechanisms other than the first: neural ones with another seed, and `parts.attributes.linear`.

Their notes have the prefix "NAME_", and their metrics the suffix ":NAME".
"""

BART_DIRECTIONS: tuple[str, ...] = ("faithfulness", "precision", "recall")
"""BARTScore from context to response, from reference to response, and from response to reference.

Source: the names are those of Yuan et al. 2021, Sec. 3.2.
"""

_AVERAGES: tuple[str, ...] = ("macro", "macro_binary")
"""LEMPEx's averages of the mechanisms' F1s: over three levels (its text), or with mid and high merged (its code)."""

F1_VARIANTS: dict[str, tuple[str, str]] = {
    **{average: ("", average) for average in _AVERAGES},
    **{judge: (f"{judge}_", "weighted") for judge in JUDGES},
    **{f"{judge}_{average}": (f"{judge}_", average) for judge in JUDGES for average in _AVERAGES},
}
"""Variants of the mechanisms' F1s: the prefix of the judge's notes, and the average."""

INTENT_VARIANTS: dict[str, tuple[str, bool]] = {
    "classifier": ("intent_classifier", False),
    "first": ("intent_first", False),
    "second": ("intent_second", False),
    "emotion_wrong": ("intent_prediction", True),
    "first_emotion_wrong": ("intent_first", True),
}
"""Variants of the accuracy of intents: the evaluated note, and whether only rows with a wrong emotion count.

ReflectDiffu claims that a second thought corrects the first if the emotion is misread: "emotion_wrong" against
"first_emotion_wrong".
"""

VARIANTS: tuple[str, ...] = (
    "perplexity:utterance_mean",
    "perplexity:mean_of_utterances",
    "perplexity_per_word:without_eos",
    "perplexity_per_word:utterance_mean",
    *(f"bleu_{n}:{name}" for name in text.BLEU_VARIANTS[1:-1] for n in range(1, text.MAX_ORDER + 1)),
    *(f"distinct_{n}:{name}" for name in (*text.DISTINCT_VARIANTS[1:-1], text.SAMPLED_VARIANT) for n in (1, 2)),
    *MOEL_METRICS,
    "token_f1",
    *(f"intent_accuracy:{variant}" for variant in INTENT_VARIANTS),
    *(f"{name}_f1:{variant}" for variant in F1_VARIANTS for name in ("empathy", *MECHANISMS)),
)
"""The same metrics by the definitions of other papers, token F1, intents of every thought, and the mechanisms by the
other judges."""

_KNOWN = frozenset((*METRICS, *VARIANTS))


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
    """Settings of scoring.

    Attributes:
      bootstrap_samples: resamples per interval and swaps per test, at least 1.
      seed: seed of the resamples.
      variants: which of VARIANTS to compute besides the metrics.
      own: user metrics after the others, "module:name" of a function `(contexts, responses, references, **fields)` to
        one number per row, whose mean is the metric. Fields are as in `core.text_functions.call_on_texts`.
    """

    bootstrap_samples: int = 1000
    seed: int = 0
    variants: tuple[str, ...] = VARIANTS
    own: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "bootstrap_samples", least=1)
        check_numbers(self, "seed", least=0)
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(f"variants has {name!r}, which is not one of {', '.join(VARIANTS)}.")
        for name in self.own:
            load_function(name, "metric")


@dataclasses.dataclass(frozen=True)
class Scores:
    """The results of `score`: metrics, named variants of them, counts, and a description of the rows.

    `rows` is as from `pairing.describe_rows`.
    """

    metrics: dict[str, Interval]
    variants: dict[str, Interval]
    counts: dict[str, int]
    rows: dict[str, Any] = dataclasses.field(default_factory=dict)


def score(rows: Sequence[Prediction], *, settings: ScoringSettings | None = None) -> Scores:
    """Computes every metric whose inputs the rows have, with 95% intervals over dialogues, or over rows without ids.

    A metric without inputs is absent. A metric whose inputs only some rows have uses those rows; `counts` gives their
    number. Empty responses are scored (they match nothing) and counted. The order of rows affects only the resamples,
    and which n-grams `of_10000` samples. Raises DataError if there are no rows, or a likelihood is not a number, and
    ConfigError if a user metric fails.
    """
    if not rows:
        raise DataError("there are no predictions to score.")
    settings = settings or ScoringSettings()
    names = (*METRICS, *settings.own)
    statistics = make_statistics(rows, (*names, *settings.variants))
    scores = confidence_intervals(
        statistics, dialogues=dialogues_of(rows), samples=settings.bootstrap_samples, seed=settings.seed
    )
    return Scores(
        metrics={name: scores[name] for name in names if name in scores},
        variants={name: scores[name] for name in settings.variants if name in scores},
        counts=count_rows(rows),
        rows=describe_rows(rows),
    )


def count_rows(rows: Sequence[Prediction]) -> dict[str, int]:
    """Counts the rows, the empty ones, and those with the inputs of optional metrics."""
    return {
        "rows": len(rows),
        "empty_responses": sum(not row.response.strip() for row in rows),
        "empty_references": sum(not row.reference.strip() for row in rows),
        "with_nll": sum(has_nll(row) for row in rows),
        "with_emotion_prediction": sum(bool(row.emotion and row.emotion_prediction) for row in rows),
        "with_intent_prediction": sum(bool(_note(row, "intent") and _note(row, "intent_prediction")) for row in rows),
        "with_exemplars": sum(bool(row.exemplars) for row in rows),
        "exemplars": sum(len(row.exemplars) for row in rows),
    }


def make_statistics(rows: Sequence[Prediction], names: Sequence[str]) -> dict[str, Statistic]:
    """Returns the named metrics of `rows` as statistics; omits those without inputs; "module:name" is a user metric."""
    families = {_perplexities: LIKELIHOODS, _bleu: _NGRAMS, _distinct: ("distinct_",), _others: ("",)}
    statistics = {name: own_statistic([rows], name) for name in names if is_own(name)}
    left = frozenset(names) - frozenset(statistics)
    for make, prefixes in families.items():
        wanted = frozenset(name for name in left if name.startswith(prefixes))
        if wanted:
            statistics.update(make(rows, wanted))
        left -= wanted
    return {name: statistics[name] for name in names if name in statistics}


def is_own(name: str) -> bool:
    """Whether a metric is a user's function: "module:name"."""
    return ":" in name and name not in _KNOWN


def try_own(names: Sequence[str], rows: Sequence[Prediction]) -> None:
    """Tests user metrics on a few rows, except those that need fields which `rows` lack.

    Raises ConfigError if a function fails, or does not return one number per row.
    """
    for name in names:
        if can_be_tried(load_function(name, "metric"), rows):
            own_statistic([rows], name)


def own_statistic(systems: Sequence[Sequence[Prediction]], name: str) -> Statistic:
    """Returns a user metric of the concatenated rows of systems; the function gets the rows of one system at a time.

    If there are several systems, one whose rows lack a required field gets NaN.
    """
    function, values = load_function(name, "metric"), []
    for rows in systems:
        if len(systems) > 1 and not can_be_tried(function, rows):
            values.append(np.full(len(rows), np.nan))
            continue
        contexts, (responses, references) = [row.context for row in rows], replies_and_references(rows)
        values.append(call_on_texts(function, f"the metric {name}", contexts, responses, references, rows))
    return mean_statistic(np.concatenate(values))


LIKELIHOODS = ("perplexity", "bits_per_byte")
"""Prefixes of the names of metrics of likelihoods."""

_NGRAMS = ("bleu_", "length_ratio", "brevity_penalty")


def has_nll(row: Prediction) -> bool:
    """Whether perplexities use a row."""
    return bool(row.notes.get("num_tokens")) and row.notes.get("nll") is not None


def _note(row: Prediction, name: str) -> str:
    return row.notes.get(name) or ""


def _perplexities(rows: Sequence[Prediction], names: frozenset[str]) -> dict[str, Statistic]:
    known = [has_nll(row) for row in rows]
    if not any(known):
        return {}
    nll = np.asarray([row.notes["nll"] if has else 0.0 for row, has in zip(rows, known, strict=True)], np.float64)
    if not np.isfinite(nll).all():
        row = int(np.flatnonzero(~np.isfinite(nll))[0])
        raise DataError(f"prediction {row + 1} ({rows[row].id or 'no id'}) has a likelihood (nll) of {nll[row]}.")
    num_tokens = [row.notes["num_tokens"] if has else 0 for row, has in zip(rows, known, strict=True)]
    num_words = [len(words.tokenize(row.reference)) for row in rows]
    num_bytes = [len(row.reference.encode()) for row in rows]
    num_cleaned = [len(words.moel_tokens(row.reference)) for row in rows]
    sizes = (np.asarray(size, np.float64) for size in (num_tokens, num_words, num_bytes, num_cleaned))
    with np.errstate(over="ignore"):  # handled below
        made = perplexity_statistics(nll, *sizes)
        values = {name: estimate(made[name]) for name in names}
    if beyond := [name for name, value in values.items() if math.isinf(value)]:
        per_token = [nll[i] / num_tokens[i] if has else 0.0 for i, has in enumerate(known)]
        row = int(np.argmax(per_token))
        raise DataError(
            f"{', '.join(sorted(beyond))} of these predictions is too large for a 64-bit number. The largest nll a "
            f"token, {per_token[row]:.6g} nats, is that of prediction {row + 1} ({rows[row].id or 'no id'})."
        )
    # The perplexity of references without a word or a byte is undefined.
    return {name: made[name] for name in names if math.isfinite(values[name])}


def _bleu(rows: Sequence[Prediction], names: frozenset[str]) -> dict[str, Statistic]:
    responses, references = replies_and_references(rows)
    counts: dict[Callable[[str], tuple[str, ...]], np.ndarray] = {}
    statistics: dict[str, Statistic] = {}
    for name in names:
        metric, _, variant = name.partition(":")
        variant = variant or "nltk"
        split = text.bleu_tokens(variant)
        if split not in counts:
            counts[split] = text.count_matches(responses, references, variant)
        if metric == "length_ratio" and not counts[split][:, 9].sum():
            continue  # references without a word have no length
        statistics[name] = _ngram_statistic(metric, counts[split], variant)
    return statistics


def _ngram_statistic(metric: str, counts: np.ndarray, variant: str) -> Statistic:
    if metric == "length_ratio":
        return text.length_ratio_statistic(counts)
    if metric == "brevity_penalty":
        return text.brevity_penalty_statistic(counts)
    if metric == "bleu_2_precision":
        return text.precision_statistic(counts, 2)
    return text.bleu_statistic(counts, int(metric.removeprefix("bleu_")), variant)


def _distinct(rows: Sequence[Prediction], names: frozenset[str]) -> dict[str, Statistic]:
    responses = [row.response for row in rows]
    statistics: dict[str, Statistic] = {}
    for name in names:
        metric, _, variant = name.partition(":")
        n, sampled = int(metric.removeprefix("distinct_")), variant == text.SAMPLED_VARIANT
        statistic = text.distinct_statistic(responses, n, "nltk" if sampled else variant or "nltk")
        if not sampled:
            statistics[name] = statistic
        elif statistic.num_items >= text.SAMPLED:
            statistics[name] = statistic.sample(text.SAMPLED)
    return statistics


def _others(rows: Sequence[Prediction], names: frozenset[str]) -> dict[str, Statistic]:
    makers: Mapping[str, Callable[[], Statistic | None]] = {
        "emotion_accuracy": lambda: _accuracy([(row.emotion, row.emotion_prediction) for row in rows]),
        "intent_accuracy": lambda: _intent_accuracy(rows),
        **{
            f"intent_accuracy:{v}": functools.partial(_intent_accuracy, rows, *how)
            for v, how in INTENT_VARIANTS.items()
        },
        "exemplar_emotion_match": lambda: _share(*empathy.exemplar_matches(rows).T),
        **{f"bart_score_{name}": functools.partial(_bart_score, rows, name) for name in BART_DIRECTIONS},
        "empathy_f1": lambda: _mechanism_f1(rows, MECHANISMS),
        **{f"{name}_f1": functools.partial(_mechanism_f1, rows, (name,)) for name in MECHANISMS},
        **{
            f"{name}_f1:{variant}": functools.partial(_mechanism_f1, rows, chosen, *how)
            for variant, how in F1_VARIANTS.items()
            for name, chosen in (("empathy", MECHANISMS), *((name, (name,)) for name in MECHANISMS))
        },
    }
    made = {name: makers[name]() if name in makers else _text_statistic(rows, name) for name in names}
    return {name: statistic for name, statistic in made.items() if statistic is not None}


def _text_statistic(rows: Sequence[Prediction], name: str) -> Statistic:
    """Returns a metric of whole texts; with ":moel" of the cleaned words of both sides."""
    responses, references = replies_and_references(rows)
    metric, _, variant = name.partition(":")
    if variant:
        responses, references = ([" ".join(words.moel_tokens(t)) for t in side] for side in (responses, references))
    makers: Mapping[str, Callable[[], Statistic]] = {
        "rouge_l": lambda: mean_statistic(text.rouge_l_rows(responses, references)),
        "token_f1": lambda: mean_statistic(text.token_f1_rows(responses, references)),
        "sentiment_mae": lambda: mean_statistic(empathy.sentiment_distances(responses, references)),
        "sentence_std": lambda: text.sentence_std_statistic(responses),
        "top5_share": lambda: text.top5_share_statistic(responses),
    }
    return makers[metric]()


def _accuracy(pairs: Sequence[tuple[str, str]]) -> Statistic | None:
    known = np.asarray([bool(label and guess) for label, guess in pairs], np.float64)
    hits = np.asarray([float(label == guess) for label, guess in pairs], np.float64)
    return _share(hits * known, known)


def _share(hits: np.ndarray, counted: np.ndarray) -> Statistic | None:
    return ratio_statistic(hits, counted, scale=100.0) if counted.any() else None


def _intent_accuracy(
    rows: Sequence[Prediction], guess: str = "intent_prediction", astray: bool = False
) -> Statistic | None:
    """Returns the accuracy of the note `guess`; `astray`: only rows whose emotion is known and mispredicted."""
    lost = [bool(row.emotion and row.emotion_prediction) and row.emotion != row.emotion_prediction for row in rows]
    counted = lost if astray else [True] * len(rows)
    return _accuracy(
        [(_note(row, "intent") if own else "", _note(row, guess)) for row, own in zip(rows, counted, strict=True)]
    )


def _bart_score(rows: Sequence[Prediction], direction: str) -> Statistic | None:
    """Returns the mean over the rows that a BART has scored, in nats per token."""
    found = [(row.notes.get("bart_score") or {}).get(direction) for row in rows]
    known = np.asarray([score is not None for score in found], np.float64)
    return ratio_statistic(np.asarray([score or 0.0 for score in found]), known) if known.any() else None


def _mechanism_f1(
    rows: Sequence[Prediction], mechanisms: Sequence[str], prefix: str = "", average: str = "weighted"
) -> Statistic | None:
    """Returns the F1 of the mechanisms in the responses against those in the references, weighted as EmpRL's Emp-F1.

    Uses `notes["reference_attributes"]` and `notes["response_attributes"]`, mechanism → level, from the judges of a
    run; with a prefix, the notes with that prefix. Other averages are those of `_AVERAGES`.
    """
    labels = [[row.level(f"{prefix}reference_attributes", name) for row in rows] for name in mechanisms]
    guesses = [[row.level(f"{prefix}response_attributes", name) for row in rows] for name in mechanisms]
    for golds, found in zip(labels, guesses, strict=True):
        if not any(gold and guess for gold, guess in zip(golds, found, strict=True)):
            return None
    if average == "macro_binary":
        labels, guesses = ([empathy.merge_levels(levels) for levels in side] for side in (labels, guesses))
        return empathy.f1_statistic(labels, guesses, empathy.MERGED_LEVELS, "macro")
    return empathy.f1_statistic(labels, guesses, LEVELS, "macro" if average == "macro" else "weighted")
