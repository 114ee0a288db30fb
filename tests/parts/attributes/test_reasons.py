"""The annotator of reasons: its rows, the words that it may mark, and its scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.config import ConfigError
from empax.core.types import Instance
from empax.data.bpe import train_bpe
from empax.data.features import SPECIAL_TOKENS
from empax.data.spans import Span, SpanExample
from empax.models.bert import BertConfig, BertEncoder
from empax.parts.attributes.reasons import (
    ReasonAnnotator,
    ReasonExamples,
    Reasons,
    ReasonTaskSettings,
    _span_starts,
    _turn_agreement,
    read_reasons,
)
from tests.systems.learning import random_like

CONTEXT = ("My dog died, it is horrible.", "Oh no!", "I miss him.")


def test_annotated_rows_mark_reasons_in_the_speakers_words():
    texts = [" ".join(CONTEXT), "The dog was mine. I miss my dog terribly."]
    pieces = train_bpe(texts, vocab_size=310, lowercase=True, special_tokens=SPECIAL_TOKENS)
    example = SpanExample("a", CONTEXT, (Span(0, 3, 11),))
    batch = ReasonExamples([example], pieces, 40).collate(np.array([0, -1]), 40, np.random.default_rng(0))
    marked = batch.source[0][batch.tags[0] == 1]
    assert pieces.decode(marked) == "dog died"
    assert not batch.told[1].any()
    assert batch.told[0][batch.tags[0] == 1].all()
    assert not (batch.told & ~batch.source_mask).any()


def test_turns_with_reasons_are_scored_beside_naming_all_turns():
    """In the longest context of each dialogue, among the speaker's turns."""
    told = (("a#2", CONTEXT[:1]), ("a#4", CONTEXT), ("b#2", ("Hi.",)))
    rows = [Instance(name, context, "x", "") for name, context in told]
    causes = {"a": (0, 1), "b": ()}
    found = _turn_agreement(lambda contexts: [(Span(2, 0, 1),), ()], rows, causes)
    assert found == {"turn_f1": 0.0, "every_turn_f1": 50.0, "dialogues": 2}  # 1 of 3 turns has a cause


def test_spans_count_as_found_only_whole():
    gold = jnp.asarray([[0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1]])
    found = jnp.asarray([[0, 1, 1, 0, 1, 1], [1, 0, 0, 1, 0, 1]])
    np.testing.assert_array_equal(jnp.stack(_span_starts(gold, found)).sum(axis=2), [[1, 1], [2, 3], [2, 2]])
    counts = {"true": 1.0, "predicted": 2.5, "gold": 2.0}
    given = {f"{kind}_{name}": count for kind in ("token", "span") for name, count in counts.items()}
    values = Reasons(None).summarize({"loss": 1.0, **given})
    assert values == {"loss": 1.0, "token_f1": pytest.approx(2 / 4.5), "span_f1": pytest.approx(2 / 4.5)}


@pytest.mark.slow
def test_the_annotator_marks_the_speakers_words_alone_and_ignores_padding():
    encoder = BertEncoder(BertConfig(20, 16, 2, 32, 1, max_positions=12))
    annotator = ReasonAnnotator(encoder)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 8)))
    mask = jnp.arange(8)[None] < jnp.asarray([8, 5])[:, None]
    told = jnp.asarray([[0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]], bool) & mask
    shapes = jax.eval_shape(annotator.init, jax.random.key(0), ids, mask)["params"]
    params = random_like(shapes, seed=1, scale=0.5)
    params["emission_bias"] = jnp.asarray([-50.0, 50.0])  # all that may be a reason is one

    run = jax.jit(lambda ids: read_reasons(annotator, params, ids, mask, told))
    composed, tags = run(ids)
    np.testing.assert_array_equal(tags, told)
    other, _ = run(jnp.where(mask, ids, 7))
    np.testing.assert_allclose(np.asarray(other)[mask], np.asarray(composed)[mask], atol=1e-5)
    moved, _ = run(ids.at[0, 7].set((ids[0, 7] + 1) % 20))
    assert (np.abs(moved - composed)[0].max(axis=-1) > 1e-6).all()  # every word is composed of all


def test_a_file_of_spans_goes_with_its_setting():
    with pytest.raises(ConfigError, match="spans = '' goes with data = 'file'"):
        ReasonTaskSettings(data="file")
