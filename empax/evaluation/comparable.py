"""Metrics that compare two systems: those that use the same rows of both, with the same labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from empax.core.types import MECHANISMS, Prediction
from empax.evaluation.scoring import F1_VARIANTS, INTENT_VARIANTS, LIKELIHOODS, has_nll, is_own

_THOUGHTS = {"intent_prediction": "intent_accuracy", "intent_first": "intent_accuracy:first"}

OWN_ROWS: dict[str, str] = {
    f"intent_accuracy:{variant}": _THOUGHTS[guess] for variant, (guess, astray) in INTENT_VARIANTS.items() if astray
}
"""Metrics over the rows that a system itself gets wrong → the same metrics over all rows."""


class _Inputs(NamedTuple):
    """The fields of a row, other than texts, that a metric reads.

    `counted` returns whether the metric uses the row, for each of its mechanisms if there are several, and `label` what
    both systems must share on such a row; `otherwise` is the reason to give if they do not.
    """

    names: str
    counted: Callable[[Prediction], tuple[bool, ...]]
    label: Callable[[Prediction], Any]
    otherwise: str


def not_comparable(name: str, rows_a: Sequence[Prediction], rows_b: Sequence[Prediction]) -> str:
    """Returns why a metric does not compare two systems with paired rows; empty = it does."""
    inputs = _inputs(name)
    if inputs is None:
        return ""
    counted, others = ([inputs.counted(row) for row in rows] for rows in (rows_a, rows_b))
    if counted != others:
        return f"{inputs.names} are given for different rows"
    pairs = [pair for pair, known in zip(zip(rows_a, rows_b, strict=True), counted, strict=True) if any(known)]
    return "" if all(inputs.label(a) == inputs.label(b) for a, b in pairs) else inputs.otherwise


def _inputs(name: str) -> _Inputs | None:
    """Returns the inputs of a metric; None if it uses every row, by its texts."""
    if is_own(name):
        return None
    base, _, variant = name.partition(":")
    if base.startswith(LIKELIHOODS):
        return _Inputs(
            "likelihoods (nll and num_tokens)",
            lambda row: (has_nll(row),),
            lambda row: row.notes["num_tokens"] if base == "perplexity" else None,
            "the references differ in their numbers of tokens (num_tokens): different tokenizers; compare "
            "perplexity_per_word or bits_per_byte",
        )
    if base == "emotion_accuracy":
        return _Inputs(
            "emotion and emotion_prediction",
            lambda row: (bool(row.emotion and row.emotion_prediction),),
            lambda row: row.emotion,
            "the emotions of the contexts differ",
        )
    if base == "exemplar_emotion_match":
        return _Inputs(
            "emotion and exemplars' emotions",
            lambda row: (bool(row.emotion) and any(exemplar.get("emotion") for exemplar in row.exemplars),),
            lambda row: row.emotion,
            "the emotions of the contexts differ",
        )
    if base == "intent_accuracy":
        guess = INTENT_VARIANTS[variant][0] if variant else "intent_prediction"
        return _Inputs(
            f"intent and {guess}",
            lambda row: (bool(row.notes.get("intent") and row.notes.get(guess)),),
            lambda row: row.notes["intent"],
            "the intents of the references differ",
        )
    if base.startswith("bart_score_"):
        direction = base.removeprefix("bart_score_")
        return _Inputs(
            f"scores of a BART ({direction})",
            lambda row: ((row.notes.get("bart_score") or {}).get(direction) is not None,),
            lambda row: row.notes.get("bart_score_model"),
            "different models scored them",
        )
    if base in ("empathy_f1", *(f"{mechanism}_f1" for mechanism in MECHANISMS)):
        prefix = F1_VARIANTS[variant][0] if variant else ""
        gold, guess = f"{prefix}reference_attributes", f"{prefix}response_attributes"
        chosen = MECHANISMS if base == "empathy_f1" else (base.removesuffix("_f1"),)
        return _Inputs(
            f"{gold} and {guess}",
            lambda row: tuple(bool(row.level(gold, one) and row.level(guess, one)) for one in chosen),
            lambda row: [row.level(gold, one) for one in MECHANISMS],
            "different judges: the levels of the references differ",
        )
    return None
