"""BLEU, Distinct, ROUGE-L, repetition: against NLTK, sacrebleu, rouge-score and counts made by hand."""

import random
import statistics

import numpy as np
import pytest
from nltk.translate.bleu_score import SmoothingFunction, corpus_bleu, sentence_bleu
from sacrebleu.metrics.bleu import BLEU

from empax.evaluation import text, words
from empax.evaluation.statistics import estimate
from tests.evaluation.values import bleu, distinct

VOCABULARY = "i am so sorry to hear that . what happened ? oh no ! it's great , don't worry ... U.S. 3.5 100% (yes) a-b"
WORDS = VOCABULARY.split()


def corpus(seed=0, rows=60):
    """Pairs with shared words, some short, some empty, some identical."""
    rng = random.Random(seed)
    references = [" ".join(rng.choices(WORDS, k=rng.randint(1, 18))) for _ in range(rows)]
    hypotheses = []
    for reference in references:
        words = reference.split()
        start = rng.randrange(len(words))
        hypotheses.append(" ".join(words[start : start + rng.randint(1, 9)] + rng.choices(WORDS, k=rng.randint(0, 6))))
    hypotheses[3], hypotheses[4] = "", references[4]
    hypotheses[5], hypotheses[6] = "zzz", "Sorry To Hear That ."
    return hypotheses, references


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("cased", [False, True])
def test_default_bleu_is_nltk_corpus_bleu_with_method1(order, cased):
    hypotheses, references = corpus()
    tokens = words.tokenize if cased else words.lower_tokens
    expected = corpus_bleu(
        [[list(tokens(r))] for r in references],
        [list(tokens(h)) for h in hypotheses],
        weights=(1 / order,) * order,
        smoothing_function=SmoothingFunction(epsilon=1e-12).method1,
    )
    found = bleu(hypotheses, references, order, "nltk_cased" if cased else "nltk")
    assert 1 < found < 99
    assert found == pytest.approx(100 * expected, rel=1e-9)


def test_bleu_smoothing_of_a_corpus_without_a_match_of_high_order():
    smooth = SmoothingFunction(epsilon=1e-12).method1
    expected = corpus_bleu([[["a", "b", "c", "d"]]], [["a", "c", "b", "d"]], smoothing_function=smooth)
    assert bleu(["a c b d"], ["a b c d"]) == pytest.approx(100 * expected, rel=1e-9)
    assert bleu(["x y"], ["a b c d"]) == 0.0
    assert bleu([""], ["a b c d"]) == 0.0


@pytest.mark.parametrize("order", [1, 2, 4])
def test_sentence_bleu_is_nltk_method4_averaged(order):
    hypotheses, references = corpus()
    scores = [
        sentence_bleu(
            [list(words.lower_tokens(r))],
            list(words.lower_tokens(h)),
            weights=(1 / order,) * order,
            smoothing_function=SmoothingFunction().method4,
        )
        if h
        else 0.0
        for h, r in zip(hypotheses, references, strict=True)
    ]
    found = bleu(hypotheses, references, order, "sentence_avg")
    assert found == pytest.approx(100 * statistics.fmean(scores), rel=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_sacrebleu_and_moses_variants_match_sacrebleu(order):
    hypotheses, references = corpus()
    theirs = BLEU(max_ngram_order=order).corpus_score(hypotheses, [references]).score
    assert bleu(hypotheses, references, order, "sacrebleu") == pytest.approx(theirs, rel=1e-9)
    moses = BLEU(max_ngram_order=order, tokenize="none", lowercase=True, smooth_method="none", force=True)
    theirs = moses.corpus_score(hypotheses, [references]).score
    assert bleu(hypotheses, references, order, "moses") == pytest.approx(theirs, rel=1e-9)


def test_sacrebleu_smoothing_halves_with_every_empty_order():
    hypotheses, references = ["a c b d", "e"], ["a b c d", "e f"]
    assert bleu(hypotheses, references, 4, "sacrebleu") == pytest.approx(
        BLEU().corpus_score(hypotheses, [references]).score, rel=1e-9
    )


def test_precision_variant_by_hand():
    # Row 1: bigrams "a b", "b a", "a b": "a b" matches once of three. Row 2: no bigram.
    assert bleu(["a b a b", "a"], ["x a b", "a"], 2, "precision") == pytest.approx(100 * (1 / 3) / 2)


def test_distinct_variants_by_hand():
    responses = ["The cat , the cat .", "the Dog."]
    # nltk: the cat , the cat . the dog . -> 9 tokens, 5 different; bigrams 5 + 2 = 7, of which "the cat" twice
    assert distinct(responses, 1) == pytest.approx(100 * 5 / 9)
    assert distinct(responses, 2) == pytest.approx(100 * 6 / 7)
    assert distinct(responses, 1, "cased") == pytest.approx(100 * 6 / 9)
    assert distinct(responses, 1, "no_punctuation") == pytest.approx(100 * 3 / 6)
    assert distinct(responses, 1, "whitespace") == pytest.approx(100 * 6 / 8)
    assert distinct(["", "a"], 2) == 0.0


def test_rouge_l_matches_rouge_score():
    from rouge_score.rouge_scorer import RougeScorer

    hypotheses, references = corpus()
    scorer = RougeScorer(["rougeL"])
    theirs = [scorer.score(r, h)["rougeL"].fmeasure for h, r in zip(hypotheses, references, strict=True)]
    assert text.rouge_l_rows(hypotheses, references).tolist() == pytest.approx(theirs, abs=1e-12)


def test_token_f1_by_hand():
    # shared: a, b (one each); 3 and 4 tokens
    assert text.token_f1_rows(["A a b", ""], ["a b c d", "x"]).tolist() == pytest.approx([100 * 2 * 2 / 7, 0])


def test_clauses_and_their_statistics_by_hand():
    responses = ["i am sorry . i hope so !", "i am sorry", "Well , i am sorry ?", "...", ""]
    assert text.clauses(responses[0]) == ["i am sorry", "i hope so"]
    counts = [3, 1, 1]
    assert estimate(text.sentence_std_statistic(responses)) == pytest.approx(statistics.pstdev(counts))
    assert estimate(text.top5_share_statistic(responses)) == pytest.approx(100.0)
    many = [f"clause {i}" for i in range(10)] * 2 + ["clause 0"]
    assert estimate(text.top5_share_statistic(many)) == pytest.approx(100 * (3 + 4 * 2) / 21)
    assert estimate(text.sentence_std_statistic(["", "."])) == estimate(text.top5_share_statistic([])) == 0.0


@pytest.mark.oracle
def test_cleaned_bleu_is_nltk_and_sacrebleu_of_the_cleaned_words():
    said = ["I'm so sorry to hear that.", "That's great! What's next?", "oh no", ""]
    wanted = ["i am sorry, that's sad.", "That is great, what is it?", "Oh no, you can't!", "hm"]
    clean = [[list(words.moel_tokens(t)) for t in side] for side in (said, wanted)]
    assert clean[0][0] == ["i", "am", "so", "sorry", "to", "hear", "that", "."]
    joined = [[" ".join(row) for row in side] for side in clean]
    found = BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(joined[0], [joined[1]])
    for order in (1, 2):
        by_nltk = corpus_bleu([[g] for g in clean[1]], clean[0], (1 / order,) * order)
        assert bleu(said, wanted, order, "moel") == pytest.approx(100 * by_nltk)
    counts = text.count_matches(said, wanted, "moel")
    assert estimate(text.brevity_penalty_statistic(counts)) == pytest.approx(found.bp)
    assert estimate(text.length_ratio_statistic(counts)) == pytest.approx(found.sys_len / found.ref_len)
    assert found.bp < 1.0
    # sacrebleu counts no bigram of a row that has none, NLTK one; precisions alone are as sacrebleu's.
    precisions = np.prod(found.precisions[:2]) ** 0.5
    assert estimate(text.precision_statistic(counts, 2)) == pytest.approx(precisions)
