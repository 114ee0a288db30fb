"""Tokens added to a pretrained model's own tokenizer: they start as their names, and transformers reads the export."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from empax.core.config import ConfigError
from empax.core.files import read_json
from empax.core.sharding import MeshSettings, make_mesh
from empax.data.bpe import train_bpe
from empax.data.features import ATTRIBUTE_TOKENS, SPECIAL_TOKENS
from empax.data.store import PlannedTokenizer
from empax.data.tokenizer_folders import load_tokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.export import Generation, export_generator
from empax.interop.grown_vocabulary import grow_vocabulary, new_tokens
from empax.interop.huggingface import load_config, load_pretrained
from empax.interop.peft import base_beneath
from empax.interop.pretrained import GeneratorSettings, load_generator
from empax.parts.generator.parts import places
from tests.interop.tiny import tiny

TEXTS = ["we won the cup", "i lost my job today", "the dog is happy"]
SPARE = 2  # rows of the embedding that no id of the model's own tokenizer has


@pytest.fixture(params=["bart", "llama"])
def folder(request, tmp_path):
    own = train_bpe(TEXTS, vocab_size=300)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1}
    changes = {"bart": ids | {"d_model": 24}, "llama": {"tie_word_embeddings": False}}[request.param]
    tiny(request.param, vocab_size=own.vocab_size + SPARE, **changes).save_pretrained(tmp_path / "model")
    own.save(tmp_path / "model")
    return tmp_path / "model"


def logits(model, params, tokens):
    ids, mask = jnp.asarray(tokens), jnp.ones(tokens.shape, bool)
    target = (ids,) if hasattr(model, "encode") else ()
    return np.asarray(jax.jit(lambda p: model.apply({"params": p}, ids, mask, *target))(params))


@pytest.fixture
def grown(folder):
    """The model with our special tokens added; its config and `old` parameters, whose first `used` rows have tokens."""
    tokenizer = load_tokenizer(folder, extra_tokens=SPECIAL_TOKENS)
    settings = GeneratorSettings(architecture="pretrained", pretrained=str(folder))
    _, config, old = load_pretrained(folder)
    loaded, used = load_generator(settings, tokenizer), load_tokenizer(folder).vocab_size
    assert loaded.model.config.vocab_size == tokenizer.vocab_size > config.vocab_size > used
    known = {"tokenizer": tokenizer, "settings": settings, "config": config, "old": old, "used": used}
    return SimpleNamespace(**known, model=loaded.model, params=loaded.params)


def test_added_tokens_start_as_their_names_and_all_else_stays(folder, grown):
    own, rows = load_tokenizer(folder), grown.config.vocab_size
    tables = {"token_embedding", "output_embedding", "output_bias"} & set(grown.old)
    for name in tables:
        now, before = np.asarray(grown.params[name]), np.asarray(grown.old[name])
        if name == "token_embedding":
            np.testing.assert_array_equal(now[: grown.used], before[: grown.used])
            for token in ATTRIBUTE_TOKENS:
                words = "a " + token.strip("<>").replace(":", " ").replace("_", " ")
                pieces = own.encode(words)[len(own.encode("a")) :]
                row = now[grown.tokenizer.token_id(token)]
                np.testing.assert_allclose(row, before[pieces].mean(axis=0), rtol=1e-5, atol=1e-6)
            assert grown.tokenizer.token_id(ATTRIBUTE_TOKENS[0]) == grown.used  # in a row that was there
        else:
            np.testing.assert_array_equal(now[:rows], before)
            apart = np.abs(now[rows:] - before.mean(axis=0)).max(axis=-1)
            np.testing.assert_array_less(apart, 0.06 * before.std() + 1e-6)
        if now.ndim == 2:
            assert len(np.unique(now[rows:], axis=0)) == grown.tokenizer.vocab_size - rows
    now, before = ({name: tree[name] for name in set(grown.old) - tables} for tree in (grown.params, grown.old))
    jax.tree.map(np.testing.assert_array_equal, now, before)


@pytest.mark.multidevice
def test_it_is_the_same_each_time_without_its_parameters_and_on_a_mesh(grown):
    given = grown.settings, grown.tokenizer
    assert load_generator(*given, with_params=False).model == grown.model
    jax.tree.map(np.testing.assert_array_equal, grown.params, load_generator(*given).params)
    place = functools.partial(places, mesh=make_mesh(MeshSettings(fsdp=4)), settings=MeshSettings(fsdp=4))
    spread = load_generator(*given, place=place).params
    jax.tree.map(np.testing.assert_array_equal, spread, grown.params)
    assert {leaf.sharding for leaf in jax.tree.leaves(spread)} == set(jax.tree.leaves(place(spread)))
    assert "fsdp" in spread["token_embedding"].sharding.spec


def test_logits_of_own_tokens_stay_and_no_added_one_is_the_likeliest(grown):
    tokens = np.random.default_rng(0).integers(3, grown.used, (2, 7))
    unchanged = logits(type(grown.model)(grown.config), grown.old, tokens)
    found = logits(grown.model, grown.params, tokens)
    np.testing.assert_allclose(found[..., : grown.used], unchanged[..., : grown.used], rtol=1e-5, atol=1e-5)
    assert (found[..., grown.config.vocab_size :].max(axis=-1) < unchanged.max(axis=-1)).all()


@pytest.mark.oracle
def test_transformers_reads_its_export_with_the_added_tokens(folder, grown, tmp_path):
    tokenizer, out = grown.tokenizer, tmp_path / "out"
    tokens = np.random.default_rng(0).integers(3, grown.used, (2, 7))
    tokens[:, 3] = [grown.config.vocab_size, tokenizer.vocab_size - 1]
    ids = (tokenizer.start_id, tokenizer.eos_id, tokenizer.pad_id)
    generation = Generation(dataclasses.asdict(DecodeSettings()), *ids)
    export_generator(out, grown.model, grown.params, tokenizer, generation, base=load_config(folder))
    assert read_json(out / "config.json")["vocab_size"] == tokenizer.vocab_size
    reads = hasattr(grown.model, "encode")
    kind = transformers.AutoModelForSeq2SeqLM if reads else transformers.AutoModelForCausalLM
    theirs, report = kind.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    arguments = {"input_ids": torch.tensor(tokens)}
    if reads:
        start = np.full((2, 1), grown.config.start_id)
        arguments["decoder_input_ids"] = torch.tensor(np.concatenate([start, tokens[:, :-1]], axis=1))
    with torch.no_grad():
        expected = theirs.eval()(**arguments).logits.numpy()
    np.testing.assert_allclose(logits(grown.model, grown.params, tokens), expected, rtol=1e-5, atol=1e-5)
    again = load_generator(GeneratorSettings(architecture="pretrained", pretrained=str(out)), tokenizer)
    jax.tree.map(np.testing.assert_array_equal, again.params, grown.params)


def test_tokenizers_that_do_not_belong_are_refused(folder, tmp_path):
    settings = GeneratorSettings(architecture="pretrained", pretrained=str(folder))
    foreign = train_bpe(["another text", "of other words and more of them", *TEXTS], vocab_size=330)
    with pytest.raises(ConfigError, match=r"its own tokenizer has other ids: they do not belong together"):
        load_generator(settings, foreign)
    larger = load_tokenizer(folder, extra_tokens=SPECIAL_TOKENS)
    larger.save(folder)  # the folder's own has more ids than its model rows
    with pytest.raises(ConfigError, match=r"ids, but .* only \d+ rows: they do not belong together"):
        load_generator(settings, larger)


def test_new_tokens_are_those_that_the_models_own_tokenizer_lacks(tmp_path):
    own = train_bpe(TEXTS, vocab_size=300)
    own.save(tmp_path)
    tokenizer = load_tokenizer(tmp_path, extra_tokens=["<speaker>", "<lost_job:today>", "<!>"])
    expected = own.encode("a lost job today")[len(own.encode("a")) :]
    assert new_tokens(tokenizer, tmp_path) == {tokenizer.token_id("<lost_job:today>"): expected}
    assert own.decode(expected) == "lost job today"
    foreign = train_bpe(["another text"], vocab_size=320, special_tokens=["<lost_job:today>"])
    for other in (load_tokenizer(tmp_path), foreign, PlannedTokenizer(400)):
        assert new_tokens(other, tmp_path) == {}
    tokenizer.save(tmp_path)  # as an export does
    assert new_tokens(tokenizer, tmp_path) == {}


def test_adapters_alone_do_not_hold_a_row_of_a_new_token(folder):
    config = load_pretrained(folder).config
    given = {"kept": False, "instead": "merge them"}
    tokenizer = load_tokenizer(folder, extra_tokens=["<sad>"])
    assert tokenizer.vocab_size <= config.vocab_size
    assert base_beneath(str(folder), config, **given) == str(folder)
    assert base_beneath(str(folder), config, tokenizer=load_tokenizer(folder), **given) == str(folder)
    with pytest.raises(ConfigError, match=r"has set 1 rows of the embedding of model, .* merge them"):
        base_beneath(str(folder), config, tokenizer=tokenizer, **given)


def test_a_row_that_is_there_is_set_for_a_new_token_and_no_output_is():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    grown = grow_vocabulary({"token_embedding": table, "output_embedding": table}, 5, {3: [0, 1], 4: [2]})
    np.testing.assert_array_equal(grown["token_embedding"], [*table[:3], [1.5, 2.5, 3.5], [6, 7, 8]])
    np.testing.assert_array_equal(grown["output_embedding"][:4], table)
    np.testing.assert_array_equal(table[3], [9, 10, 11])


def test_growing_by_nothing_changes_nothing():
    params = {"token_embedding": np.ones((4, 3), np.float32), "output_bias": np.arange(4.0, dtype=np.float32)}
    jax.tree.map(np.testing.assert_array_equal, grow_vocabulary(params, 4), params)
    np.testing.assert_array_equal(grow_vocabulary(params, 6)["output_bias"], [0, 1, 2, 3, 1.5, 1.5])
