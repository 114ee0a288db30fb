import dataclasses
import gzip
import math
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

from empax.core import types as core
from empax.core.config import ConfigError, to_settings
from empax.core.files import DataError, write_jsonl
from empax.core.types import Instance, Prediction
from empax.data.empathetic_dialogues import load_corpus
from empax.evaluation import scoring, text
from empax.evaluation.normalisation import NORMALISATIONS
from empax.evaluation.published import NOT_COMPARABLE, PAPER_OF, TABLES
from empax.evaluation.rows import read_predictions, released, to_prediction
from empax.evaluation.scoring import ScoringSettings, score
from empax.evaluation.statistics import estimate
from tests.evaluation.values import bleu, distinct

FAST = ScoringSettings(bootstrap_samples=20)
LEVELS = {"emotional_reaction": "low", "interpretation": "mid", "exploration": "high"}


def full_rows(num=12):
    rows = []
    for i in range(num):
        wrong = i % 4 == 0
        notes = {
            "nll": 12.0 + i, "num_tokens": 6,
            "intent": "encouraging", "intent_first": "encouraging", "intent_second": "wishing",
            "intent_classifier": "encouraging", "intent_prediction": "wishing" if wrong else "encouraging",
            "bart_score": {"faithfulness": -3.0, "precision": -2.0 - i, "recall": -1.0}, "bart_score_model": "made up",
            "reference_attributes": LEVELS,
            "response_attributes": {**LEVELS, "exploration": "low" if wrong else "high"},
            "linear_reference_attributes": LEVELS,
            "linear_response_attributes": {**LEVELS, "exploration": "low"} if wrong else LEVELS,
            "second_seed_reference_attributes": LEVELS,
            "second_seed_response_attributes": LEVELS if wrong else {**LEVELS, "interpretation": "low"},
        }  # fmt: skip
        response = "That is great news!" if i % 3 else "Oh no. I am sorry."
        rows.append(
            Prediction(
                ("I passed!",), response, "That is really great!", id=f"d{i}#2", emotion="proud", notes=notes,
                emotion_prediction="sad" if wrong else "proud", exemplars=({"emotion": "proud"}, {"emotion": "sad"}),
            )
        )  # fmt: skip
    return rows


def test_full_rows_give_every_metric_and_variant_with_an_interval_around_it():
    scores = score(full_rows(), settings=FAST)
    assert tuple(scores.metrics) == scoring.METRICS
    sampled = {f"distinct_{n}:{text.SAMPLED_VARIANT}" for n in (1, 2)}  # of so few words there is none
    assert [*scores.variants] == [name for name in scoring.VARIANTS if name not in sampled]
    for found in (*scores.metrics.values(), *scores.variants.values()):
        assert set(found) == {"value", "low", "high"}
        assert found["low"] <= found["value"] + 1e-9
        assert found["value"] <= found["high"] + 1e-9
    value = {name: found["value"] for name, found in scores.metrics.items()}
    assert value["emotion_accuracy"] == value["intent_accuracy"] == pytest.approx(75.0)
    assert value["exemplar_emotion_match"] == pytest.approx(50.0)
    assert value["emotional_reaction_f1"] == value["interpretation_f1"] == pytest.approx(100.0)
    # all labels are "high", 9 of 12 found: precision 1, recall 3/4
    assert value["exploration_f1"] == pytest.approx(100 * 2 * 0.75 / 1.75)
    assert value["empathy_f1"] == pytest.approx((200 + value["exploration_f1"]) / 3)
    second = {name: found["value"] for name, found in scores.variants.items()}
    assert second["interpretation_f1:linear"] == pytest.approx(100.0)
    assert second["exploration_f1:linear"] < 100.0
    assert second["exploration_f1:second_seed"] == pytest.approx(100.0)
    assert second["interpretation_f1:second_seed"] == pytest.approx(100 * 2 * 0.25 / 1.25)
    assert second["empathy_f1:second_seed"] == pytest.approx((200 + 40.0) / 3)
    assert value["perplexity"] == pytest.approx(math.exp(sum(12 + i for i in range(12)) / 72))
    assert value["perplexity_per_word"] == pytest.approx(math.exp(sum(12 + i for i in range(12)) / (12 * 6)))
    responses, references = [r.response for r in full_rows()], [r.reference for r in full_rows()]
    assert value["bleu_2"] == pytest.approx(bleu(responses, references, 2))
    assert scores.variants["bleu_2:moses"]["value"] == pytest.approx(bleu(responses, references, 2, "moses"))
    assert scores.variants["distinct_1:cased"]["value"] == pytest.approx(distinct(responses, 1, "cased"))
    assert scores.variants["token_f1"]["value"] == pytest.approx(text.token_f1_rows(responses, references).mean())


def test_a_metric_without_inputs_is_absent_and_empty_responses_count():
    rows = [
        Prediction(context=("hi",), response=response, reference="oh good .") for response in ("oh good .", "", "  ")
    ]
    scores = score(rows, settings=FAST)
    assert set(scores.metrics) == {
        *(f"bleu_{n}" for n in (1, 2, 3, 4)), "rouge_l", "distinct_1", "distinct_2",
        "bleu_2_precision", "brevity_penalty", "length_ratio", "sentiment_mae", "sentence_std", "top5_share",
    }  # fmt: skip
    assert not [name for name in scores.variants if name.startswith("perplexity")]
    assert scores.counts["rows"] == 3
    assert scores.counts["empty_responses"] == 2
    assert scores.metrics["rouge_l"]["value"] == pytest.approx(1 / 3)


def test_partial_inputs_are_over_their_rows_and_counted():
    rows = full_rows(4)
    rows[1] = dataclasses.replace(rows[1], notes={}, emotion_prediction="")
    scores = score(rows, settings=FAST)
    assert scores.counts["with_nll"] == scores.counts["with_emotion_prediction"] == 3
    assert scores.metrics["perplexity"]["value"] == pytest.approx(math.exp((12 + 14 + 15) / 18))
    assert scores.metrics["emotion_accuracy"]["value"] == pytest.approx(200 / 3)


def test_scores_do_not_depend_on_the_machine_state_but_on_the_seed():
    rows = full_rows()
    assert score(rows, settings=FAST) == score(rows, settings=FAST)
    other = score(rows, settings=dataclasses.replace(FAST, seed=1))
    assert other != score(rows, settings=FAST)
    assert other.metrics["bleu_2"]["value"] == score(rows, settings=FAST).metrics["bleu_2"]["value"]


def test_errors_name_what_is_wrong():
    with pytest.raises(DataError, match="no predictions"):
        score([])
    bad = dataclasses.replace(full_rows(1)[0], notes={"nll": math.nan, "num_tokens": 3})
    with pytest.raises(DataError, match=r"prediction 2 \(d0#2\) has a likelihood"):
        score([full_rows(1)[0], bad], settings=FAST)
    with pytest.raises(ConfigError, match="'bleu_2:mose', which is not one of"):
        to_settings(ScoringSettings, {"variants": ["bleu_2:mose"]}, where="config.report")
    with pytest.raises(ValueError, match="bootstrap_samples = 0 must be at least 1"):
        ScoringSettings(bootstrap_samples=0)


def test_scores_say_which_rows_they_are_over_and_draw_dialogues():
    scores = score(full_rows(), settings=FAST)
    assert scores.rows["resampled"] == "dialogues"
    assert (scores.rows["rows"], scores.rows["dialogues"]) == (12, 12)
    of_two = [dataclasses.replace(row, id=f"d{i // 6}#{2 + i % 6}") for i, row in enumerate(full_rows())]
    unnamed = [dataclasses.replace(row, id="") for row in of_two]
    assert score(unnamed, settings=FAST).rows["resampled"] == "rows"
    two = score(of_two, settings=FAST)
    assert two.rows["dialogues"] == 2
    # Each half has the same share of errors, so whole dialogues say the same; single rows do not.
    halves = score(unnamed, settings=FAST).metrics["rouge_l"]
    assert two.metrics["rouge_l"]["low"] == pytest.approx(two.metrics["rouge_l"]["high"])
    assert halves["high"] - halves["low"] > 0.01


def test_a_cleaned_metric_reads_cleaned_text_on_both_sides():
    rows = [
        Prediction(("hi",), "I'm glad you're OK.", "i am glad you are ok .", notes={"nll": 16.0, "num_tokens": 3}),
        Prediction(("hi",), "It's bad", "THAT'S TOO bad!", notes={"nll": 12.0, "num_tokens": 3}),
    ]
    both = score(rows, settings=FAST)
    value = {name: found["value"] for name, found in (both.metrics | both.variants).items()}
    said = [[*["i", "am", "glad", "you", "are", "ok", "."]], [*["it", "is", "bad"]]]
    assert value["distinct_1:moel"] == pytest.approx(100 * len({w for row in said for w in row}) / 10)
    assert value["length_ratio:moel"] == pytest.approx(10 / 12)
    assert value["brevity_penalty:moel"] == pytest.approx(math.exp(1 - 12 / 10))
    # matched: all 7 words of the first, "is" and "bad" of the second; pairs: 6 of 6, none of 2
    assert value["bleu_2_precision:moel"] == pytest.approx(100 * math.sqrt(9 / 10 * 6 / 8))
    assert value["bleu_2:moel"] == pytest.approx(value["brevity_penalty:moel"] * value["bleu_2_precision:moel"])
    assert value["bleu_2:moel"] > value["bleu_2"]
    assert value["rouge_l:moel"] > value["rouge_l"]
    # each reference with its end token: 7 + 1 and 5 + 1 words
    assert value["perplexity_per_word:moel"] == pytest.approx(math.exp((16 / 8 + 12 / 6) / 2))


@pytest.mark.real_data
@pytest.mark.slow
def test_runs_stand_beside_released_outputs_as_their_authors_cleaned_them(real_data):
    corpus = load_corpus(str(real_data)).instances
    runs = Path(__file__).parents[2] / "results" / "runs" / "reg"
    expected = {
        runs / "transformer" / "0" / "outputs.jsonl.gz": (9.78, 35.7),
        runs / "transformer-semantic" / "0" / "outputs.jsonl.gz": (9.73, None),
        runs / "transformer-no_retrieval" / "0" / "outputs.jsonl.gz": (9.66, 34.3),
        real_data / "peer_outputs" / "transformer.jsonl": (9.21, None),
    }
    for path, (bleu_2, perplexity) in expected.items():
        rows, bad = read_predictions(path, corpus)
        assert not bad
        made = scoring.make_statistics(rows, ("bleu_2:moel", "perplexity_per_word:moel"))
        assert estimate(made["bleu_2:moel"]) == pytest.approx(bleu_2, abs=0.005)
        if perplexity:
            assert estimate(made["perplexity_per_word:moel"]) == pytest.approx(perplexity, abs=0.05)


def test_references_without_a_word_have_no_length():
    rows = [Prediction(id="a#2", context=("a",), reference="  ", response="b")]
    assert "length_ratio" not in scoring.make_statistics(rows, ("length_ratio", "bleu_2"))


def test_a_row_comes_back_from_its_fields():
    row = full_rows(1)[0]
    fields = dataclasses.asdict(row) | {"context": list(row.context), "exemplars": list(row.exemplars)}
    assert to_prediction(fields) == row


def test_macro_f1s_of_three_levels_and_of_two_are_scikit_learns():
    rng = np.random.default_rng(0)
    drawn = rng.integers(3, size=(2, 40, 3))
    names = list(LEVELS)
    notes = [[{name: core.LEVELS[side[i, c]] for c, name in enumerate(names)} for i in range(40)] for side in drawn]
    rows = [
        Prediction(("a",), "b", "c", notes={"linear_reference_attributes": gold, "linear_response_attributes": guess})
        for gold, guess in zip(*notes, strict=True)
    ]
    variants = score(rows, settings=FAST).variants
    for labels, variant in ((drawn, "linear_macro"), (np.minimum(drawn, 1), "linear_macro_binary")):
        expected = [100 * f1_score(labels[0, :, c], labels[1, :, c], average="macro") for c in range(3)]
        for name, f1 in zip(names, expected, strict=True):
            assert variants[f"{name}_f1:{variant}"]["value"] == pytest.approx(f1)
        assert variants[f"empathy_f1:{variant}"]["value"] == pytest.approx(np.mean(expected))
    assert "empathy_f1:macro" not in variants


def test_intents_of_every_thought_and_where_the_emotion_is_wrong():
    thoughts = [  # emotion predicted, intent, first, second, final
        ("sad", "sad", "wishing", "wishing", "neutral", "wishing"),
        ("sad", "proud", "wishing", "neutral", "wishing", "wishing"),
        ("sad", "proud", "wishing", "neutral", "neutral", "neutral"),
        ("sad", "", "wishing", "wishing", "neutral", "neutral"),
        ("sad", "proud", "", "wishing", "wishing", "wishing"),
    ]
    rows = [
        Prediction(("a",), "b", "c", emotion=emotion, emotion_prediction=predicted, notes={
            "intent": gold, "intent_first": first, "intent_second": second, "intent_prediction": final})
        for emotion, predicted, gold, first, second, final in thoughts
    ]  # fmt: skip
    found = score(rows, settings=FAST)
    assert found.metrics["intent_accuracy"]["value"] == 50.0
    expected = {"first": 50.0, "second": 25.0, "emotion_wrong": 50.0, "first_emotion_wrong": 0.0}
    assert {n: found.variants[f"intent_accuracy:{n}"]["value"] for n in expected} == expected
    assert not [name for name in score([Prediction(("a",), "b", "c")], settings=FAST).variants if "intent" in name]


def test_published_tables_are_percentages_under_our_names():
    for table in (table for pair in TABLES.values() for table in pair):
        for row in table.values():
            assert set(row) <= {*scoring.METRICS, *scoring.VARIANTS}
            assert row.get("emotion_accuracy", 20.0) >= 20.0
    assert [(len(rows), len(fewer)) for rows, fewer in TABLES.values()] == [(20, 8), (11, 4), (4, 3), (10, 5), (8, 6)]
    for rows, fewer in TABLES.values():
        whole = next(iter(fewer))  # the system itself
        assert rows[whole] == fewer[whole]
    assert all(set(columns) <= set(TABLES[table][0][row]) for row, table in PAPER_OF.items() if table in NOT_COMPARABLE
               for columns in [NOT_COMPARABLE[table]])  # fmt: skip
    assert all(row in TABLES[table][0] for row, table in PAPER_OF.items())


def test_released_rows_have_no_word_of_the_corpus_and_get_them_back(tmp_path):
    corpus = {
        f"{name}#2": Instance(f"{name}#2", (f"{name}, said one",), f"{name}, said another", "proud")
        for name in ("asked", "found")
    }
    asked, found = corpus.values()
    exemplar = {"id": found.id, "context": list(found.context), "response": found.response, "emotion": found.emotion}
    row = dataclasses.replace(
        full_rows(1)[0],
        id=asked.id,
        context=asked.context,
        reference=asked.response,
        exemplars=({**exemplar, "score": 1},),
    )
    path = tmp_path / "outputs.jsonl.gz"
    with_facts = dataclasses.replace(row, notes={**row.notes, "facts": [{"tail": "said by ATOMIC"}]})
    write_jsonl(path, [released(with_facts), {"id": "elsewhere#2", "response": "Oh."}])
    assert "said" not in gzip.decompress(path.read_bytes()).decode()
    rows, bad = read_predictions(path, corpus)
    assert rows == [row]
    assert [str(line) for line in bad] == [
        "line 2: lacks 'context' and 'reference', and the corpus has no instance 'elsewhere#2'"
    ]
    assert [line.reason for line in read_predictions(path)[1]] == ["lacks 'context', 'reference'"] * 2
    unknown = dict.fromkeys(("context", "reference", "emotion"))  # as a table of pandas writes them
    nothing = [{**exemplar, "response": None} for exemplar in released(row)["exemplars"]]
    write_jsonl(path, [{**released(row), **unknown, "exemplars": nothing}])
    assert read_predictions(path, corpus) == ([row], [])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="is cut short, damaged, or not gzipped"):
        read_predictions(path)


def test_the_page_of_metrics_names_every_metric_and_normalisation():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w:]+)`", page.replace("bleu_N", "bleu_2")))
    for name in scoring.METRICS:
        assert name in named or name in ("bleu_2", "bleu_3"), name  # "bleu_1 to bleu_4"
    for name in scoring.VARIANTS:
        variant = name.partition(":")[2]
        assert {name, f":{variant}", f"bleu_2:{variant}"} & named, name
    assert set(NORMALISATIONS) <= named
