"""Text normalisations of the metrics: part of a metric's name, and a condition of comparability."""

from __future__ import annotations

NORMALISATIONS: dict[str, str] = {
    "nltk": "lower case, NLTK words",
    "cased": "case kept, NLTK words",
    "no_punctuation": "lower case, NLTK words without , . ? !",
    "whitespace": "case kept, white-space tokens",
    "moses": "lower case, white-space tokens",
    "sacrebleu": "case kept, mteval's 13a tokens",
    "moel": "MoEL's clean: lower case, 23 contractions written out, NLTK words",
    "alphanumeric": "lower case, runs of a-z and 0-9",
    "raw": "the text as it is written",
    "model": "the model's own tokens",
}
"""Normalisations of response and reference, with descriptions."""

_DEFAULTS = {
    "rouge_l": "alphanumeric",
    "sentiment_mae": "raw",
    "sentence_std": "raw",
    "top5_share": "raw",
    "bits_per_byte": "raw",
    "perplexity": "model",
    "perplexity_per_word": "cased",
    "bart_score_faithfulness": "raw",
    "bart_score_precision": "raw",
    "bart_score_recall": "raw",
}
"""Normalisations of metrics that do not use lower-case NLTK words."""

_WORDS = ("bleu_", "distinct_", "length_ratio", "brevity_penalty", "token_f1")
_VARIANTS = {"nltk_cased": "cased", "sentence_avg": "nltk", "precision": "nltk"}

MOEL_METRICS: tuple[str, ...] = (
    "perplexity_per_word:moel",
    "bleu_1:moel", "bleu_2:moel", "bleu_3:moel", "bleu_4:moel",
    "bleu_2_precision:moel", "brevity_penalty:moel", "length_ratio:moel",
    "rouge_l:moel", "distinct_1:moel", "distinct_2:moel",
    "sentiment_mae:moel", "sentence_std:moel", "top5_share:moel", "token_f1:moel",
)  # fmt: skip
"""Metrics with the text normalisation of MoEL and its descendants, of both response and reference."""


def normalisation(metric: str) -> str:
    """Returns one of NORMALISATIONS for a metric's name with its variant; empty for a metric that reads no text."""
    base, _, variant = metric.partition(":")
    if variant in NORMALISATIONS:
        return variant
    if variant in _VARIANTS:
        return _VARIANTS[variant]
    return _DEFAULTS.get(base, "nltk" if base.startswith(_WORDS) else "")


def beside_peers(metric: str) -> str:
    """Returns the variant of a metric by which released outputs are comparable with ours.

    Released outputs and references are cleaned like MoEL's, so both sides must be. Empty if there is no such variant:
    perplexities of the model's own tokens.
    """
    if not normalisation(metric):
        return metric
    cleaned = f"{metric.partition(':')[0]}:moel"
    return cleaned if cleaned in MOEL_METRICS else ""
