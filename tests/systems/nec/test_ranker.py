"""The ranker of facts about things: which pairs it learns from, where it looks, its loss, and what it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from empax.core.types import Instance
from empax.data import features
from empax.data.bpe import train_bpe
from empax.data.knowledge import Fact
from empax.data.tokenizers import SEPARATOR
from empax.interop.pretrained_encoders import EncoderSettings, load_encoder
from empax.systems.nec.ranker import PairExamples, Ranker, make_pairs, mark_of, mark_places, render, repeats
from tests.systems.learning import keys, learn

KNIFE = Fact("knife", "ObjectUse", "cutting bread")


@pytest.mark.parametrize(
    ("fact", "response", "expected"),
    [
        (KNIFE, "Are you cutting bread with it?", True),
        (KNIFE, "Are you cutting it?", False),
        (KNIFE, "Cutting Bread!", True),
        (KNIFE, "I like breadcrumbs, cutting breadcrumbs", False),  # whole words
        (Fact("knife", "HasProperty", "be"), "It must be hard.", False),  # says nothing
        (Fact("knife", "HasProperty", "there"), "Is it there?", False),  # a function word
        (Fact("knife", "HasProperty", "odd"), "How odd!", True),  # three letters say enough
        (Fact("steel", "MadeUpOf", "knife"), "It is of steel?", True),  # the other way round
        (Fact("dog", "ObjectUse", "cutting bread"), "Are you cutting bread?", False),  # no dog in the context
    ],
)
def test_a_response_repeats_a_fact_by_its_words(fact, response, expected):
    assert repeats(fact, "I lost my knife.", response) is expected


def test_every_repeated_fact_is_paired_with_every_other_about_things():
    facts = [
        KNIFE,
        Fact("knife", "MadeUpOf", "steel"),
        Fact("x", "xReact", "steel"),
        Fact("knife", "AtLocation", "home"),
    ]
    rows = [Instance("a#2", ("My knife is gone.",), "Was it steel?", "", {"facts": [f.row() for f in facts]}),
            Instance("b#2", ("My knife is gone.",), "Oh.", "", {"facts": [f.row() for f in facts]})]  # fmt: skip
    assert [(p.repeated.tail, p.other.tail) for p in make_pairs(rows)] == [
        ("steel", "cutting bread"),
        ("steel", "home"),
    ]
    with_other_gold = [Instance("a#2", ("My knife is gone.",), "Is it home?", "", rows[0].notes)]
    assert make_pairs(with_other_gold)[0].repeated.tail == "home"


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["I lost my knife.", "knife ObjectUse cutting bread", "dog AtLocation home steel"] * 3
    return train_bpe(texts, vocab_size=330, special_tokens=features.SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def ranker(tokenizer):
    settings = EncoderSettings(d_model=16, num_heads=2, d_ff=32, num_layers=1, dropout=0.0, max_positions=64)
    return Ranker(load_encoder(settings, tokenizer).model, mark_of(tokenizer), 0.3)


def test_the_mark_is_one_token_behind_the_context_and_the_context_gives_way(tokenizer):
    mark = mark_of(tokenizer)
    assert mark == tokenizer.token_id(SEPARATOR)
    (whole,) = render(tokenizer, [("I lost my knife.",)], [KNIFE], 60, mark)
    (short,) = render(tokenizer, [("I lost my knife.",)], [KNIFE], len(whole) - 2, mark)
    fact = tokenizer.encode("knife ObjectUse cutting bread")
    assert whole[-len(fact) :] == short[-len(fact) :] == fact
    assert len(short) == len(whole) - 2
    (tight,) = render(tokenizer, [("I lost my knife.",)], [KNIFE], 8, mark)
    last = tokenizer.encode("I lost my knife.")[-1]
    assert tight == [tokenizer.cls_id, last, tokenizer.sep_id, mark, *fact[:4]]  # half is for the fact
    ids, mask = features.pad([whole, short], 60, 0)
    places = mark_places(jnp.asarray(ids), jnp.asarray(mask), mark)
    assert places.tolist() == [len(row) - len(fact) - 1 for row in (whole, short)]


def loss_of(ranker):
    return jax.jit(lambda params, given: ranker.loss(params, {}, given, jax.random.key(0), train=False))


@pytest.mark.oracle
def test_the_loss_is_torchs_margin_ranking_and_cross_entropy(ranker, tokenizer):
    facts = [KNIFE, Fact("knife", "MadeUpOf", "steel"), Fact("knife", "AtLocation", "home")]
    notes = {"facts": [fact.row() for fact in facts]}
    pairs = make_pairs([Instance("a#2", ("My knife is gone.",), "Was it steel?", "", notes)])
    rows = PairExamples(pairs, tokenizer, 48).collate(np.array([0, 1, -1]), 48, np.random.default_rng(0))
    given = jax.tree.map(jnp.asarray, rows)
    params = jax.jit(ranker.init)(jax.random.key(0), given)
    read = jax.jit(lambda ids, mask: ranker.read(params, ids, mask, None))
    states = jax.jit(ranker.encoder.encoder.apply)(
        {"params": params["encoder"]["encoder"]}, given.source, given.source_mask
    )
    marked = np.asarray(states)[np.arange(2), mark_places(given.source, given.source_mask, ranker.mark)[:2]]
    vectors = jax.jit(lambda ids, mask: ranker.vectors(params, ids, mask, rng=None))(given.source, given.source_mask)
    np.testing.assert_allclose(vectors[:2], marked, rtol=1e-5)
    good, good_logits = (np.array(x[:2]) for x in read(given.source, given.source_mask))
    rest, rest_logits = (np.array(x[:2]) for x in read(given.target, given.target_mask))
    both = torch.tensor(good), torch.tensor(rest)
    margin = torch.nn.functional.margin_ranking_loss(*both, torch.ones(2), margin=0.3)
    entropy = torch.nn.functional.cross_entropy(
        torch.tensor(np.concatenate([good_logits, rest_logits])), torch.tensor([1, 1, 0, 0])
    )
    loss, metrics = loss_of(ranker)(params, given)
    np.testing.assert_allclose(loss.value(), float(margin + entropy), rtol=1e-5)
    assert float(metrics["pair_accuracy"].weight) == 2.0
    wide = loss_of(dataclasses.replace(ranker, margin=0.9))(params, given)[0]
    assert float(wide.value()) == pytest.approx(float(loss.value()) + 0.6, rel=1e-5)


@pytest.mark.slow
def test_it_learns_which_fact_a_response_takes_up(ranker, tokenizer):
    facts = [KNIFE, Fact("dog", "AtLocation", "home")]
    texts = ("I lost my knife.", "my dog")
    rows = [Instance(f"{n}#2", (text,), "cutting bread at home", "", {"facts": [f.row() for f in facts]})
            for n, text in enumerate(texts)]  # fmt: skip
    pairs = make_pairs(rows)
    assert {p.repeated.head for p in pairs} == {"knife", "dog"}
    given = jax.tree.map(
        jnp.asarray, PairExamples(pairs, tokenizer, 40).collate(np.arange(2), 40, np.random.default_rng(0))
    )
    loss = lambda params, key: ranker.loss(params, {}, given, key, train=False)  # noqa: E731
    params, _ = learn(loss, jax.jit(ranker.init)(jax.random.key(0), given), keys(60), 1e-2)
    assert float(loss(params, jax.random.key(0))[1]["pair_accuracy"].value()) == 1.0
