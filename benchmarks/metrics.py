"""Text metrics: empax.evaluation against nltk, rouge-score and sacrebleu, which compute the same numbers.

BLEU-1 to 4 in the five variants of these libraries, ROUGE-L, Distinct-1 and 2. All numbers must agree before timing.
Metrics that none of the three computes (sentiment, repetition, accuracies) are left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nltk.tokenize.destructive import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
from nltk.translate.bleu_score import SmoothingFunction, corpus_bleu, sentence_bleu
from nltk.util import ngrams
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU

from benchmarks import texts
from benchmarks.paired import DisagreementError, Row, arguments, report, seconds, timed
from empax.core.types import Prediction
from empax.data.english import ABBREVIATIONS
from empax.evaluation import words
from empax.evaluation.rows import read_predictions
from empax.evaluation.scoring import ScoringSettings, make_statistics, score
from empax.evaluation.statistics import estimate

HELD_EQUAL = (
    "one process, one thread; the same responses and references",
    "the same 23 numbers: BLEU-1 to 4 (nltk corpus level, lower-cased and cased; nltk sentence level, averaged; "
    "sacrebleu; multi-bleu's), ROUGE-L, Distinct-1 and 2; equal to 1e-9 relative",
    "NLTK's own word tokenizer on both sides, each text tokenised once a round: our caches are emptied before",
    "theirs: all orders of BLEU from one pass, where the library can give them (nltk's list of weights, sacrebleu's "
    "counts)",
    "point estimates alone: theirs gives no intervals; what ours take with them is `all_with_intervals_seconds`",
)

_WAYS = ("", ":nltk_cased", ":sentence_avg", ":moses", ":sacrebleu")
NAMES = (*(f"bleu_{n}{way}" for way in _WAYS for n in (1, 2, 3, 4)), "rouge_l", "distinct_1", "distinct_2")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=5)
    texts.add_flag(parser)
    parser.add_argument("--predictions", default="", help="outputs, as empax.evaluate takes them; empty = generated")
    parser.add_argument("--rows", type=int, default=5255, help="number of outputs (5255)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.rows, options.rounds = 40, 1
    rows = make_rows(options)
    responses, references = [row.response for row in rows], [row.reference for row in rows]
    check(our_numbers(rows), their_numbers(responses, references))
    took = timed(lambda: our_numbers(rows), lambda: their_numbers(responses, references), options.rounds)
    clear()
    whole = seconds(lambda: score(rows, settings=ScoringSettings(bootstrap_samples=10 if options.smoke else 1000)))
    facts = {"all_with_intervals_seconds": round(whole, 3)}
    sizes = f"{len(rows)} outputs, {Path(options.predictions).name or 'made of ' + texts.name_of(options.data)}"
    return report("metrics", {"text": Row(*took, "seconds", facts=facts)}, (*HELD_EQUAL, sizes), smoke=options.smoke)


def make_rows(options: argparse.Namespace) -> list[Prediction]:
    """Reads outputs from a file, or makes rows from references of the corpus, with parts of them in the responses."""
    if options.predictions:
        return read_predictions(Path(options.predictions))[0][: options.rows]
    found = texts.instances(options.data, "test" if options.data else "train")
    vocabulary = " ".join(instance.response for instance in found).split()
    rng = random.Random(0)
    rows = []
    for number in range(options.rows):
        reference = found[number % len(found)].response.split()
        if number >= len(found):  # the sample is small: repeated rows must have different texts
            reference = reference[: rng.randint(1, len(reference))] + rng.choices(vocabulary, k=rng.randint(3, 15))
        start = rng.randrange(len(reference))
        response = reference[start : start + rng.randint(1, 6)] + rng.choices(vocabulary, k=rng.randint(0, 10))
        rows.append(Prediction((), " ".join(response), " ".join(reference)))
    return rows


def clear() -> None:
    """Clears our token caches."""
    for function in (words.tokenize, words.lower_tokens, words._chunk_words):
        function.cache_clear()


def our_numbers(rows: Sequence[Prediction]) -> dict[str, float]:
    clear()
    return {name: estimate(statistic) for name, statistic in make_statistics(rows, NAMES).items()}


def their_numbers(responses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    said, wanted = tokenize(responses), tokenize(references)
    lower_said, lower_wanted = ([[token.lower() for token in row] for row in side] for side in (said, wanted))
    numbers: dict[str, float] = {}
    weights = [(1 / n,) * n for n in (1, 2, 3, 4)]
    smoothing = SmoothingFunction(epsilon=1e-12)
    for way, hypotheses, golds in (("", lower_said, lower_wanted), (":nltk_cased", said, wanted)):
        scores = corpus_bleu([[g] for g in golds], hypotheses, weights, smoothing.method1)
        numbers |= {f"bleu_{n}{way}": 100 * value for n, value in enumerate(scores, start=1)}
    method4 = SmoothingFunction().method4
    per_row = [
        sentence_bleu([g], h, weights, method4) if h else [0.0] * 4
        for g, h in zip(lower_wanted, lower_said, strict=True)
    ]
    numbers |= {f"bleu_{n + 1}:sentence_avg": 100 * statistics.fmean(row[n] for row in per_row) for n in range(4)}
    plain = {"tokenize": "none", "lowercase": True, "smooth_method": "none", "force": True}
    for way, options in ((":sacrebleu", {}), (":moses", plain)):
        found = BLEU(**options).corpus_score(list(responses), [list(references)])
        smooth = {"smooth_method": options.get("smooth_method", "exp")}
        for n in (1, 2, 3, 4):
            sums = found.counts[:n], found.totals[:n], found.sys_len, found.ref_len
            numbers[f"bleu_{n}{way}"] = BLEU.compute_bleu(*sums, max_ngram_order=n, **smooth).score
    scorer = RougeScorer(["rougeL"])
    rouge = [scorer.score(r, h)["rougeL"].fmeasure for h, r in zip(responses, references, strict=True)]
    numbers["rouge_l"] = statistics.fmean(rouge)
    for n in (1, 2):
        runs = [run for row in lower_said for run in ngrams(row, n)]
        numbers[f"distinct_{n}"] = 100 * len(set(runs)) / max(1, len(runs))
    return numbers


def tokenize(sentences: Sequence[str]) -> list[list[str]]:
    """Tokenizes like `nltk.word_tokenize`, with a sentence model that needs no download."""
    parameters = PunktParameters()
    parameters.abbrev_types = set(ABBREVIATIONS)  # the same as ours, so that the tokens are equal
    parts, split = PunktSentenceTokenizer(parameters).tokenize, NLTKWordTokenizer().tokenize
    return [[token for part in parts(sentence) for token in split(part)] for sentence in sentences]


def check(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Raises DisagreementError if two numbers differ."""
    if set(ours) != set(theirs):
        raise DisagreementError(f"not the same metrics: {', '.join(sorted(set(ours) ^ set(theirs)))}.")
    wrong = [name for name in ours if abs(ours[name] - theirs[name]) > 1e-9 * max(abs(theirs[name]), 1e-3)]
    if wrong:
        raise DisagreementError("; ".join(f"{name}: {ours[name]} here, {theirs[name]} there" for name in wrong))


if __name__ == "__main__":
    main()
