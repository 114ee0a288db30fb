"""BARTScore against PyTorch, and where it may come in."""

import dataclasses
import itertools
import json
import math
import types

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import DataError, write_json
from empax.core.types import Prediction
from empax.evaluation import scoring
from empax.evaluation.comparable import not_comparable
from empax.evaluation.rows import to_prediction
from empax.pipeline import bart_score
from empax.pipeline.bart_score import BartScorer, bart_scored, check_bart
from empax.reporting.score_file import score_file
from tests.data.small_tokenizers import trained

TEXTS = ["I lost my dog.", "Oh no, I am so sorry to hear that!", "", "We won the cup, it was great " * 6]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a random BART, with its tokenizer."""
    place = tmp_path_factory.mktemp("bart")
    backend = trained("BPE", TEXTS, SPECIAL, vocab_size=300)
    frame = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    backend.post_processor = frame
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64}
    counts = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = transformers.BartConfig(vocab_size=backend.get_vocab_size(), init_std=0.3, **sizes, **counts, **heads)
    transformers.BartForConditionalGeneration(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def scorer(folder):
    return BartScorer.load(str(folder))


def by_torch(folder, source, target):
    """As the authors' code has it: the loss of a text without padding, over all of its tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BartForConditionalGeneration.from_pretrained(folder).eval()
    read = [tokenizer(text, return_tensors="pt", truncation=True, max_length=64) for text in (source, target)]
    with torch.no_grad():
        return -model(**read[0], labels=read[1]["input_ids"]).loss.item()


@pytest.mark.oracle
@pytest.mark.slow
def test_scores_are_those_of_torch_whatever_stands_beside_a_text(folder, scorer):
    sources, targets = TEXTS, [*TEXTS[1:], TEXTS[0]]
    expected = [by_torch(folder, *pair) for pair in zip(sources, targets, strict=True)]
    np.testing.assert_allclose(scorer(sources, targets), expected, rtol=1e-4)
    assert len({round(value, 3) for value in expected}) == len(expected)


class Counting:
    """In place of a BART: the id 7 is the likelier of 64 the more ids the source has, with its frame."""

    config = types.SimpleNamespace(max_positions=32)
    pad_id, framing = 0, ([1], [2])

    def apply(self, variables, source, source_mask, target):
        sevens = jax.nn.one_hot(target * 0 + 7, 64)
        return source_mask.sum(axis=1)[:, None, None] * sevens

    def encode_batch(self, texts):
        return [[7 if word == "I" else 8 for word in text.split()] for text in texts]


@pytest.fixture
def counting():
    model = Counting()
    return BartScorer(model, {}, model, "made")


def test_a_score_is_the_mean_over_the_ids_of_a_framed_and_cut_text_in_whatever_batch(counting, monkeypatch):
    monkeypatch.setattr(bart_score, "_ROWS_OF_TOKENS", 32)  # two short rows or a long one
    texts = ["I am", "I", "", "so " * 29 + "I I", "I " * 15]

    def expected(source, target):
        count, row = (len(counting._framed([text])[0]) for text in (source, target))
        sevens = counting._framed([target])[0].count(7)
        return count * sevens / row - math.log(math.exp(count) + 63)

    assert counting._framed(texts)[3] == [1, *[8] * 29, 7, 2]
    pairs = list(itertools.product(texts, texts))
    found = counting(*zip(*pairs, strict=True))
    np.testing.assert_allclose(found, [expected(*pair) for pair in pairs], rtol=1e-5)


def rows():
    return [Prediction((TEXTS[0],), TEXTS[1], TEXTS[3], id="a#2"), Prediction(("Hm.", TEXTS[0]), TEXTS[3], TEXTS[1])]


def test_each_direction_reads_its_texts(counting):
    found = bart_scored(rows(), counting)
    wanted = {"faithfulness": (TEXTS[0], TEXTS[1]), "precision": (TEXTS[3], TEXTS[1]), "recall": (TEXTS[1], TEXTS[3])}
    for name, (source, target) in wanted.items():
        assert found[0].notes["bart_score"][name] == pytest.approx(float(counting([source], [target])[0]), abs=2e-5)
    expected = counting([f"Hm. {TEXTS[0]}"], [TEXTS[3]])
    assert found[1].notes["bart_score"]["faithfulness"] == pytest.approx(float(expected[0]), abs=2e-5)
    assert found[1].notes["bart_score_model"] == "made"


@pytest.mark.slow
def test_a_file_has_the_metrics_only_where_a_bart_is_given(folder, scorer, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"context": list(r.context), "response": r.response, "reference": r.reference} for r in rows()]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    settings = scoring.ScoringSettings(bootstrap_samples=2, variants=())
    without = score_file(path, settings).scores.metrics
    assert not any(name.startswith("bart_score") for name in without)
    metrics = score_file(path, settings, bart_score=str(folder)).scores.metrics
    scores = [row.notes["bart_score"]["recall"] for row in bart_scored(rows(), scorer)]
    assert metrics["bart_score_recall"]["value"] == pytest.approx(np.mean(scores), abs=1e-5)
    assert {name for name in metrics if name not in without} == {
        f"bart_score_{name}" for name in scoring.BART_DIRECTIONS
    }


def test_scores_of_two_models_do_not_compare(counting):
    first = bart_scored(rows(), counting)
    second = bart_scored(rows(), dataclasses.replace(counting, hash="other"))
    assert not_comparable("bart_score_recall", first, second) == "different models scored them"
    assert not_comparable("bart_score_recall", first, first) == ""


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({"bart_score": 0.563, "bart_score_model": "x"}, "must map"),
        ({"bart_score": {"recall": 0.563}, "bart_score_model": "x"}, "at most 0"),
        ({"bart_score": {"recall": -2.5}}, "needs 'bart_score_model'"),
    ],
)
def test_another_number_under_its_name_is_refused(notes, said):
    with pytest.raises(DataError, match=said):
        to_prediction({"context": [], "response": "", "reference": "", **notes})


def test_another_model_than_a_bart_is_refused(tmp_path):
    sizes = {"vocab_size": 9, "d_model": 4, "d_kv": 2, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    write_json(tmp_path / "config.json", {"model_type": "t5", **sizes})
    with pytest.raises(ConfigError, match="holds a 't5'; BARTScore needs the folder of a BART"):
        check_bart(str(tmp_path))
