"""The effect of exemplars: one system's likelihoods and replies with different exemplars, on the same rows.

Letters: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from empax.core.files import DataError
from empax.core.types import Prediction
from empax.evaluation import text
from empax.evaluation.pairing import dialogues_of
from empax.evaluation.significance import confidence_intervals
from empax.evaluation.statistics import DifferenceStatistic, Statistic, mean_statistic, ratio_statistic
from empax.evaluation.words import tokenize

PARTS = ("first", "rest", "end")
"""Parts of a response: its first token, all tokens between it and the end, and its end token."""

BESIDE = ("own", "none")
"""The baselines of all comparisons."""


def score_swaps(
    lines: Sequence[Mapping[str, Any]], references: Mapping[str, Prediction], *, samples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Returns the table of the lines of a swaps.jsonl.gz, with 95% intervals over dialogues; differences are paired.

    `references` are rows of the test set by id; `seed` is that of the resamples, and of the bigrams sampled for an
    equal number.

    Returns:
      `rows`; `given`, for each kind of exemplars: `nll` (nats per reply), `nll_per_token`, `nll_first`, `nll_rest`,
      `nll_end` (nats per reply, their sum is `nll`), and `exemplar_f1` (percent), each with interval; in `minus_own`
      and `minus_none` the differences of all these. `replies`: `rows`, `bigrams` (the number behind each Distinct-2)
      and `given`, with `bleu_2_precision`, `distinct_2`, `words`, `questions`, and `minus_own`; empty without replies.

    Raises DataError if the rows differ between kinds of exemplars, or `references` lacks one.
    """
    by_given: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        by_given.setdefault(line["given"], {})[line["id"]] = line
    ids = list(next(iter(by_given.values()), {}))
    for name, found in by_given.items():
        if list(found) != ids or any(row not in references for row in ids):
            raise DataError(f"the swaps of {name!r} are over other rows than the rest or the predictions.")
    if not ids:
        return {"rows": 0, "given": {}, "replies": {}}
    shown = [references[row] for row in ids]
    likelihoods = {name: _likelihoods([found[row] for row in ids]) for name, found in by_given.items()}
    made = {"rows": len(ids), "given": _with_intervals(likelihoods, shown, BESIDE, samples, seed), "replies": {}}
    answered = [row for row in ids if all("response" in found[row] for found in by_given.values())]
    if answered:
        shown = [references[row] for row in answered]
        said = {name: [found[row]["response"] for row in answered] for name, found in by_given.items()}
        statistics, bigrams = _replies(said, [row.reference for row in shown], seed)
        of_replies = _with_intervals(statistics, shown, BESIDE[:1], samples, seed)
        made["replies"] = {"rows": len(answered), "bigrams": bigrams, "given": of_replies}
    return made


def _likelihoods(rows: Sequence[Mapping[str, Any]]) -> dict[str, Statistic]:
    """Returns statistics over the same rows, so that differences are paired."""
    column = {name: np.array([row[name] for row in rows], np.float64) for name in ("nll", "num_tokens")}
    found: dict[str, Statistic] = {
        "nll": mean_statistic(column["nll"]),
        "nll_per_token": ratio_statistic(column["nll"], column["num_tokens"]),
    }
    for part in PARTS:
        found[f"nll_{part}"] = mean_statistic(np.array([row[f"nll_{part}"] for row in rows], np.float64))
    there = np.array(["exemplar_f1" in row for row in rows], np.float64)
    if there.any():
        likeness = np.array([row.get("exemplar_f1", 0.0) for row in rows], np.float64)
        found["exemplar_f1"] = ratio_statistic(likeness, there)
    return found


def _replies(
    said: Mapping[str, Sequence[str]], references: Sequence[str], seed: int
) -> tuple[dict[str, dict[str, Statistic]], int]:
    """Returns statistics of replies, with Distinct-2 at the smallest number of bigrams, and that number."""
    distinct = {name: text.distinct_statistic(replies, 2) for name, replies in said.items()}
    bigrams = min(statistic.num_items for statistic in distinct.values())
    found: dict[str, dict[str, Statistic]] = {}
    for name, replies in said.items():
        words = np.array([len(tokenize(reply)) for reply in replies], np.float64)
        asks = np.array(["?" in reply for reply in replies], np.float64)
        found[name] = {
            "bleu_2_precision": text.precision_statistic(text.count_matches(replies, references, "nltk"), 2),
            "distinct_2": distinct[name].sample(bigrams, seed=seed),
            "words": mean_statistic(words),
            "questions": mean_statistic(asks, scale=100.0),
        }
    return found, bigrams


def _with_intervals(
    statistics: Mapping[str, Mapping[str, Statistic]],
    rows: Sequence[Prediction],
    beside: Sequence[str],
    samples: int,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Returns the values of each kind of exemplars, and in `minus_NAME` their differences from those of `beside`."""
    flat: dict[tuple[str, str, str], Statistic] = {}
    for given, own in statistics.items():
        for name, statistic in own.items():
            flat[given, "", name] = statistic
            for other in beside:
                against = statistics.get(other, {}).get(name)
                if other != given and against is not None:
                    flat[given, f"minus_{other}", name] = DifferenceStatistic(statistic, against)
    found: dict[str, dict[str, Any]] = {given: {} for given in statistics}
    cells = confidence_intervals(flat, dialogues=dialogues_of(rows), samples=samples, seed=seed)
    for (given, against, name), cell in cells.items():
        (found[given].setdefault(against, {}) if against else found[given])[name] = cell
    return found


def meaning(found: Mapping[str, Any]) -> str:
    """Returns one sentence on the likelihoods of `score_swaps`; empty unless "own", "random" and "none" were given."""
    given = found["given"]
    if not {"own", "random", "none"} <= given.keys():
        return ""
    random, none = given["random"]["minus_own"]["nll"], given["own"]["minus_none"]["nll"]
    first = f"The exemplars that the system finds {_effect(_turned(random))} than random ones do"
    second = f"they {_effect(none)} than none do"
    parts = [f"{first} ({_nats(_turned(random))})", f"{second} ({_nats(none)})"]
    if "nearest" in given:
        oracle = given["nearest"]["minus_own"]["nll"]
        there = (
            "would save more"
            if oracle["high"] < 0
            else "would save nothing more"
            if oracle["low"] <= 0
            else "cost likelihood"
        )
        parts.append(f"those nearest to the gold reply, which nobody knows, {there} ({_nats(oracle)})")
    return f"{'; '.join(parts)}."


def _effect(difference: Mapping[str, float]) -> str:
    if difference["high"] < 0:
        return "make the reference likelier"
    return "make the reference less likely" if difference["low"] > 0 else "make the reference no likelier"


def _turned(cell: Mapping[str, float]) -> dict[str, float]:
    return {"value": -cell["value"], "low": -cell["high"], "high": -cell["low"]}


def _nats(cell: Mapping[str, float]) -> str:
    return f"{cell['value']:+.3f} nats a reply, {cell['low']:+.3f} to {cell['high']:+.3f}"
