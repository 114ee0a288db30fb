"""An encoder with heads: what it begins with, where its dropout comes from, and what is asked of it in batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from empax.core.types import Batch, Mean
from empax.data.bpe import train_bpe
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.heads import ClassificationHead, unit_variance
from empax.parts.encoder import task as module
from empax.parts.encoder.task import EncoderTask, Predictor
from empax.retrieval.encode import BUCKETS

CONFIG = BertConfig(300, d_model=8, num_heads=2, d_ff=16, num_layers=1, max_positions=BUCKETS[-1], dropout=0.3)
TEXTS = ["a b c d e f g h i j k l m n o p q r", "c", "d e f"]


@dataclasses.dataclass(frozen=True)
class Toy(EncoderTask):
    """Two heads, of which the second is told to be 1."""

    @property
    def heads(self):
        return {"first": ClassificationHead(2), "second": ClassificationHead(1)}

    def said(self, *outputs):
        return outputs

    def losses(self, found, batch, *, train):
        return Mean.of((found[1][:, 0] - 1.0) ** 2, batch.valid), {}

    def rows(self, tokenizer, max_tokens, *given):
        return [tokenizer.encode(text)[:max_tokens] for text in given[0]]

    def predicted(self, found):
        return jnp.stack([found[0], found[0] + found[1]], axis=1)


class Apart(Toy):
    def keys(self, rng):
        return tuple(jax.random.split(rng))


class Kept(Toy):
    kept = "toys"


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([" ".join(TEXTS)], vocab_size=300)


@pytest.fixture(scope="module")
def batch():
    ids, mask = jnp.arange(12).reshape(3, 4) + 5, jnp.ones((3, 4), bool)
    return Batch(ids, mask, ids[:, :1], mask[:, :1], jnp.array([True, True, False]))


@pytest.fixture(scope="module")
def params(batch):
    return jax.jit(Toy(DualEncoder(BertEncoder(CONFIG))).init)(jax.random.key(1), batch)


def toy(made=Toy):
    return made(DualEncoder(BertEncoder(CONFIG)))


def test_encoder_and_each_head_are_drawn_for_themselves(batch, params):
    assert sorted(params) == ["encoder", "first", "second"]

    @jax.jit
    def expected():
        keys = jax.random.split(jax.random.key(1), 3)
        return {
            "encoder": toy().encoder.init(keys[0], batch.source, batch.source_mask)["params"],
            "first": ClassificationHead(2).init(keys[1], jnp.zeros((1, 8)))["params"],
            "second": ClassificationHead(1).init(keys[2], jnp.zeros((1, 8)))["params"],
        }

    jax.tree.map(np.testing.assert_array_equal, params, expected())


def test_the_loss_is_of_what_the_heads_say_of_real_rows_and_drops_out_in_training_alone(batch, params):
    loss = jax.jit(lambda task, key, train: task.loss(params, {}, batch, key, train=train)[0].value(),
                   static_argnums=(0, 2))  # fmt: skip
    keys = jax.random.split(jax.random.key(0))
    encode = jax.jit(toy().encoder.apply)
    encoding = np.asarray(unit_variance(encode({"params": params["encoder"]}, batch.source, batch.source_mask)))
    said = encoding @ np.asarray(params["second"]["out"]) + np.asarray(params["second"]["out_bias"])
    calm = loss(toy(), keys[0], False)
    assert float(calm) == pytest.approx(np.mean((said[:2, 0] - 1.0) ** 2), rel=1e-5)
    assert loss(toy(), keys[1], False) == calm
    noisy = {float(loss(toy(made), key, True)) for made in (Toy, Apart) for key in keys}
    assert len(noisy) == 4
    assert float(calm) not in noisy


def test_heads_read_small_vectors_as_they_read_large_ones(batch, params, monkeypatch):
    """The states of a T5's encoder, for example, are a tenth as large as those of a BERT."""
    read = lambda: toy().read(params, batch.source, batch.source_mask, None)[1]  # noqa: E731
    vectors = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    monkeypatch.setattr(Toy, "vectors", lambda *args, **options: jnp.asarray(vectors))
    large = read()
    monkeypatch.setattr(Toy, "vectors", lambda *args, **options: jnp.asarray(0.005 * vectors))
    np.testing.assert_allclose(read(), large, rtol=1e-4)


def test_texts_one_by_one_and_in_batches_are_answered_alike(tokenizer, params):
    ask = Predictor(toy(), params, tokenizer, 12)
    found = ask(TEXTS)
    assert found.shape == (3, 2, 2)
    assert np.abs(found[:, 1] - found[:, 0]).min() > 0
    for text, row in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(ask([text])[0], row, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dataclasses.replace(ask, buckets=(12,))([text])[0], row, rtol=1e-4, atol=1e-5)
    assert ask([]).shape == (0, 2, 2)
    cut = dataclasses.replace(ask, max_tokens=1)
    np.testing.assert_allclose(cut(["c d e f"]), cut(["c"]), rtol=1e-5)


def test_answers_to_many_texts_are_kept_across_runs_where_a_task_says_so(tokenizer, params, tmp_path, monkeypatch):
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "KEPT_FROM", 2)
    read = []

    def embed(_, params, ids, **options):
        read.append((len(ids), options["progress"]))
        return np.array([sum(row) for row in ids]) * params["w"]

    monkeypatch.setattr(module, "embed", embed)

    def ask(weight, *texts, made=Kept):
        return Predictor(toy(made), {"w": np.float64(weight)}, tokenizer, 12)(texts)

    first = ask(1, *TEXTS)
    np.testing.assert_array_equal(ask(1, *TEXTS), first)
    assert read == [(3, "texts")]
    assert [path.parent.name for path in tmp_path.rglob("*.npy")] == ["toys"]
    np.testing.assert_array_equal(ask(2, *TEXTS), 2 * first)  # another task
    ask(1, *TEXTS[1:])  # other texts
    assert len(read) == 3
    ask(1, "c")
    ask(1, "c")
    assert read[3:] == [(1, None)] * 2  # few: not worth a file, nor a bar
    ask(1, *TEXTS, made=Toy)
    ask(1, *TEXTS, made=Toy)
    assert len(read) == 7
