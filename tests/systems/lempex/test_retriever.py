"""LEMPEx' retriever: its loss with all masks, a toy that it learns, and what its settings change."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

from configs import lempex, lempex_retriever
from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir
from empax.core.system import Assembly, RunContext
from empax.core.types import Instance
from empax.data.bpe import train_bpe
from empax.data.features import pad
from empax.data.store import load_instances
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder, Towers
from empax.parts.exemplars.dense import DenseRetriever, dense_examples, negatives_of
from empax.parts.exemplars.dense_retrieval import FILES, FOLDER, Keys, RetrievalBatch, RetrievalExamples
from empax.pipeline import prepare
from empax.pipeline.plan import make_plan, plain
from empax.retrieval.encode import embedders
from empax.systems.lempex.retriever import TowerParts, check_towers, pretrained_towers
from empax.systems.lempex.settings import LempexSettings, RetrieverTaskSettings
from empax.training.loop import LoopSettings, fit

D = 5


@dataclasses.dataclass(frozen=True)
class Tables:
    """Towers that look a text's first id up."""

    def embed_queries(self, params, ids, mask, *, rng=None):
        return params["query"][ids[:, 0]]

    def embed_keys(self, params, ids, mask, *, rng=None):
        return params["key"][ids[:, 0]]


def batch_of(texts, groups):
    """Four rows, the last a filler row; ids are places in the tables."""
    texts, groups = np.array(texts), np.array(groups)
    rows, per_row = texts.shape
    valid = np.array([True] * (rows - 1) + [False])
    there = (texts >= 0) & valid[:, None]
    ids = np.arange(rows * per_row).reshape(rows, per_row, 1)
    fields = {
        "source": np.arange(rows)[:, None],
        "source_mask": valid[:, None],
        "key": ids,
        "key_mask": there[..., None],
        "key_text": np.where(there, texts, -1),
        "key_group": np.where(there, groups, -1),
        "valid": valid,
    }
    return RetrievalBatch(**jax.tree.map(jnp.asarray, fields))


# The second context's response is also a negative of the first; two contexts are of one dialogue; one negative is not
# there; one is of the first context's dialogue.
TEXTS = [[0, 1, 2], [3, 4, -1], [5, 0, 6], [0, 0, 0]]
GROUPS = [[0, 5, 6], [1, 0, -1], [0, 7, 8], [9, 9, 9]]
NEGATIVES = [
    [0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0],
    [1, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0],
    [0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0],
]


def test_the_same_text_the_same_dialogue_and_what_is_not_there_are_no_negatives():
    found = np.asarray(negatives_of(batch_of(TEXTS, GROUPS)))
    np.testing.assert_array_equal(found[:3].astype(int), NEGATIVES)


@pytest.mark.oracle
def test_the_loss_is_the_cross_entropy_over_all_keys_of_the_batch():
    rng = np.random.default_rng(0)
    tables = {"query": rng.normal(size=(4, D)), "key": rng.normal(size=(12, D))}
    tables = {name: table.astype(np.float32) for name, table in tables.items()}
    given = {name: torch.tensor(table, requires_grad=True) for name, table in tables.items()}
    positives = torch.tensor([0, 3, 6])
    scores = given["query"][:3] @ given["key"].T / 0.5
    counts = torch.tensor(NEGATIVES, dtype=torch.bool)
    counts[torch.arange(3), positives] = True
    expected = torch.nn.functional.cross_entropy(scores.masked_fill(~counts, -torch.inf), positives)
    expected.backward()

    task, batch = DenseRetriever(Tables(), 0.5), batch_of(TEXTS, GROUPS)
    loss = lambda params: task.loss(params, {}, batch, jax.random.key(0), train=False)[0].value()  # noqa: E731
    value, gradients = jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, tables))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-6)
    for name, table in given.items():
        np.testing.assert_allclose(gradients[name], table.grad.numpy(), rtol=1e-5, atol=1e-6)


TOPICS, EMOTIONS = 4, 2
CELLS = TOPICS * EMOTIONS


class Words(nn.Module):
    """Word embeddings and a hidden layer, which all words share."""

    @nn.compact
    def __call__(self, ids, mask, *, deterministic=True):
        return nn.Dense(8)(nn.tanh(nn.Dense(8)(nn.Embed(20, 8)(ids))))


BOTH, WORDS = ("other_emotion", "same_emotion"), DualEncoder(Words(), normalize=True)


def toy(negatives, tower, *, two=True):
    """Four topics by two emotions, a word for each context and one for each response."""
    keys = Keys([[10 + cell] for cell in range(CELLS)], np.arange(CELLS), np.repeat(np.arange(EMOTIONS), TOPICS))
    contexts = [[1 + cell] for cell in range(CELLS)]
    examples = RetrievalExamples(contexts, keys, negatives, pad_id=0, max_key_tokens=1)
    return examples, DenseRetriever(Towers(tower, tower if two else None), 0.2)


def confusions(task, params, examples):
    """Contexts whose best response is another one: of the same emotion, and of another."""
    whole = jax.tree.map(jnp.asarray, examples.collate(np.arange(len(examples)), 1, np.random.default_rng(0)))
    queries = task.towers.embed_queries(params, whole.source, whole.source_mask)
    keys = task.towers.embed_keys(params, whole.key[:, 0], whole.key_mask[:, 0])
    best = np.asarray(queries @ keys.T).argmax(axis=1)
    emotion, wrong = examples.keys.emotions, best != np.arange(len(best))
    alike = emotion[best] == emotion
    return int((wrong & alike).sum()), int((wrong & ~alike).sum())


def trained_toy(negatives, tower, steps=200):
    """Every batch has one context, so that nothing but what is drawn is a negative; one of each makes an update."""
    examples, task = toy(negatives, tower)
    optimizer = optax.adam(0.01)

    def batches(step):
        made = [examples.collate(np.array([i]), 1, np.random.default_rng([step, i])) for i in range(CELLS)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *made)

    def loss(params, made):
        return jax.vmap(lambda batch: task.loss(params, {}, batch, jax.random.key(0), train=False)[0].value())(
            made
        ).mean()

    def update(state, made):
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params, made), moments)
        return (optax.apply_updates(params, updates), moments), None

    made = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *map(batches, range(steps)))
    params = jax.jit(task.init)(jax.random.key(0), jax.tree.map(lambda leaf: leaf[0, 0], made))
    (params, _), _ = jax.jit(lambda params: jax.lax.scan(update, (params, optimizer.init(params)), made))(params)
    return confusions(task, params, examples)


@pytest.mark.slow
def test_without_negatives_of_the_same_emotion_topics_are_confused_within_an_emotion():
    config = BertConfig(20, d_model=8, num_heads=1, d_ff=8, num_layers=1, max_positions=4, dropout=0.0)
    tower = DualEncoder(BertEncoder(config), normalize=True)
    assert trained_toy(BOTH, tower) == (0, 0)
    within, across = trained_toy(("other_emotion",), tower)
    assert within > 0
    assert across == 0


def test_one_tower_has_the_gradient_of_both():
    examples, task = toy(BOTH, WORDS)
    _, alone = toy(BOTH, WORDS, two=False)
    batch = jax.tree.map(jnp.asarray, examples.collate(np.arange(8), 1, np.random.default_rng(0)))
    both = jax.jit(task.init)(jax.random.key(0), batch)
    one = jax.jit(alone.init)(jax.random.key(0), batch)
    jax.tree.map(np.testing.assert_array_equal, both["query_encoder"], one["encoder"])

    def gradient(task, params):
        return jax.jit(jax.grad(lambda p: task.loss(p, {}, batch, jax.random.key(0), train=False)[0].value()))(params)

    apart, shared = gradient(task, both), gradient(alone, one)
    summed = jax.tree.map(jnp.add, apart["query_encoder"], apart["key_encoder"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), summed, shared["encoder"])
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(apart["key_encoder"])) > 1e-3
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(apart["query_encoder"])) > 1e-3


def test_a_batch_is_not_cut(tmp_path):
    examples, task = toy((), WORDS)
    for name in ("accumulate", "minibatches"):
        settings = LoopSettings(steps=1, batch_size=16, buckets=(1,), **{name: 2})
        with pytest.raises(ConfigError, match=rf"config\.retriever\.{name} = 2 splits a batch of 16, .*set {name} = 1"):
            fit(Assembly(task, examples, None), settings=settings, directory=tmp_path / "retriever")


@pytest.mark.parametrize("machine", lempex_retriever.MACHINES)
def test_the_retriever_alone_is_trained_as_that_of_the_whole_system(machine):
    alone, whole = (recipe.get_config(f"machine={machine}").retriever for recipe in (lempex_retriever, lempex))
    assert alone.to_dict() == whole.to_dict()


def tiny(**sections):
    config = plain(lempex_retriever.get_config("tiny"))
    config["data"]["limit"] = 12
    for name, values in sections.items():
        config[name] |= values
    return config


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The data of a run, with pairs of Reddit beside it."""
    folder = tmp_path_factory.mktemp("lempex")
    (folder / FOLDER).mkdir()
    answers = {"positive_ctxs": "That is hard.", "negative_ctxs": "Go away.", "hard_negative_ctxs": "So what?"}
    entry = {"question": "I failed my exam.", **{name: [{"text": text}] for name, text in answers.items()}}
    for name in FILES.values():
        (folder / FOLDER / name).write_text(json.dumps([entry]))
    files = WorkDir(folder / "run")
    plan = make_plan(tiny(data={"dir": str(folder)}))
    prepare.run(plan.stages["prepare"].settings, RunContext(files, plan, "prepare"))
    return folder, files


def built(prepared, stage="retriever", **sections):
    folder, files = prepared
    sections = {**sections, "data": {"dir": str(folder)}}
    plan = make_plan(tiny(**sections))
    context = RunContext(files, plan, stage)
    return context, plan.stages[stage].spec.build(plan.stages[stage].settings, context)


def test_the_pairs_of_reddit_come_with_their_negatives(prepared):
    context, alone = built(prepared)
    _, both = built(prepared, retriever={"dpr_data": "ed_reddit"})
    assert [len(made.train) for made in (alone, both)] == [12, 13]
    assert len(both.validation) == len(alone.validation) + 1
    tokenizer = TowerParts.of(context).retrieval.encoder.tokenizer
    batch = both.train.collate(np.array([12]), 16, np.random.default_rng(0))
    said = [
        tokenizer.decode(ids[mask][1:-1].tolist()) for ids, mask in zip(batch.key[0], batch.key_mask[0], strict=True)
    ]
    assert said == ["that is hard.", "go away.", "so what?"]
    assert tokenizer.decode(batch.source[0][batch.source_mask[0]][1:-1].tolist()) == "i failed my exam."
    assert batch.key_group[0, 0] >= 0
    assert (batch.key_group[0, 1:] == -1).all()
    for step in range(20):  # nobody else is given an answer of Reddit
        drawn = both.train.collate(np.arange(12), 16, np.random.default_rng(step))
        np.testing.assert_array_equal(drawn.key_group >= 0, drawn.key_mask.any(axis=-1))


def test_settings_change_what_is_embedded(prepared):
    folder, files = prepared
    small = {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_layers": 2}
    found = {}
    for name, values in {
        "separate": {},
        "shared": {"towers": "shared"},
        "exchange": {"key": "exchange"},
        "not normal": {"retriever": small},
    }.items():
        plan = make_plan(tiny(data={"dir": str(folder)}, lempex=values))
        context = RunContext(files, plan, "index")
        parts = TowerParts.of(context)
        made = parts.corpus_encoder({name: np.zeros(1) for name in parts.towers.names})
        found[name] = made.hash, made.key_text(load_instances(context, "train")), parts.towers
    assert len({hash for hash, _, _ in found.values()}) == 4
    assert found["separate"][2].names == ("query_encoder", "key_encoder")
    assert found["shared"][2].names == ("encoder", "encoder")
    assert found["exchange"][1] != found["separate"][1] == found["shared"][1]
    assert not found["not normal"][2].query.normalize
    assert found["separate"][2].query.normalize


def test_temperature_and_negatives_reach_the_task(prepared):
    _, made = built(prepared)
    _, other = built(prepared, retriever={"temperature": 1.0, "negatives": ("other_emotion",)})
    assert (made.task.temperature, made.train.negatives) == (0.05, ("other_emotion", "same_emotion"))
    assert (other.task.temperature, other.train.negatives) == (1.0, ("other_emotion",))


def test_the_retriever_learns_from_what_it_is_asked_with(prepared):
    context, _ = built(prepared)
    retrieval = TowerParts.of(context).retrieval
    asked = Instance("a#2", ("I failed my exam.",), "Oh no.", "sad", {"reasons": [(0, 2, 8)]})
    for query, words in (("context", "i failed my exam."), ("reasons", "failed")):
        own = dataclasses.replace(retrieval, settings=dataclasses.replace(retrieval.settings, query=query))
        (ids,) = dense_examples(own, RetrieverTaskSettings(), [asked]).queries
        assert retrieval.encoder.tokenizer.decode(ids[1:-1]) == words


SIZES = {"num_attention_heads": 2, "intermediate_size": 12, "num_hidden_layers": 1, "max_position_embeddings": 20}


def dpr_folder(folder, side, *, width=8, words="a b"):
    tokenizer = train_bpe([words], vocab_size=300)
    torch.manual_seed(len(side))
    name = f"DPR{side}Encoder"
    config = transformers.DPRConfig(vocab_size=300, hidden_size=width, architectures=[name], **SIZES)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model


@pytest.mark.oracle
def test_two_folders_of_a_dpr_are_two_towers(prepared, tmp_path):
    models = [dpr_folder(tmp_path / side, side) for side in ("Question", "Context")]
    _, files = prepared
    chosen = {"retriever": {"pretrained": str(tmp_path / "Question")}, "key_pretrained": str(tmp_path / "Context")}
    context = RunContext(files, make_plan(tiny(lempex=chosen)), "index")
    check_towers(context)
    encoder, instances = pretrained_towers(context), load_instances(context, "train")
    texts = encoder.query_text(instances), encoder.key_text(instances)
    for model, rows, embed in zip(models, texts, embedders(encoder.model), strict=True):
        ids, mask = pad(rows[:4], 16, encoder.pad_id)
        expected = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).pooler_output
        found = jax.jit(embed)(encoder.params, jnp.asarray(ids), jnp.asarray(mask))
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 12}, r"makes vectors of 12, .* of 8: they cannot be compared; name two encoders of the same size"),
        ({"words": "c d e f"}, "reads other ids than .*; name two encoders with one vocabulary"),
    ],
)
def test_two_towers_that_do_not_belong_together_are_refused(tmp_path, changes, said):
    dpr_folder(tmp_path / "q", "Question")
    dpr_folder(tmp_path / "k", "Context", **changes)
    dpr_folder(tmp_path / "advised", "Context")

    def check(folder):
        chosen = {"retriever": {"pretrained": str(tmp_path / "q")}, "key_pretrained": str(tmp_path / folder)}
        check_towers(RunContext(WorkDir(tmp_path / "run"), make_plan(tiny(lempex=chosen)), "index"))

    with pytest.raises(ConfigError, match=said):
        check("k")
    check("advised")


@pytest.mark.parametrize(
    ("cls", "values", "said"),
    [
        (LempexSettings, {"emotion_share": 0.5}, "attributes = False with emotion_share = 0.5"),
        (LempexSettings, {"key_pretrained": "x"}, "key_pretrained = 'x' is the second of two pretrained towers"),
        (
            LempexSettings,
            {"key_pretrained": "x", "towers": "shared", "retriever": {"pretrained": "y"}},
            "set towers = 'separate' and retriever.pretrained, or leave it empty",
        ),
        (RetrieverTaskSettings, {"negatives": ("same_emotion", "same_emotion")}, "must name each kind once"),
        (RetrieverTaskSettings, {"negatives": ("same",)}, "takes one of 'other_emotion', 'same_emotion'"),
        (RetrieverTaskSettings, {"temperature": 0.0}, "temperature = 0.0 must be at least"),
    ],
)
def test_wrong_settings_are_named(cls, values, said):
    with pytest.raises(ConfigError, match=said):
        to_settings(cls, values, where="config.x")
