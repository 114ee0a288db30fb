"""A run that decodes and compares as the folders of its pretrained models say."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from empax.core.config import ConfigError
from empax.core.sharding import MeshSettings
from empax.core.types import Instance
from empax.data.bpe import train_bpe
from empax.data.exemplars import ContextExamples
from empax.data.features import SPECIAL_TOKENS
from empax.data.store import PlannedTokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import GeneratorSettings, LoadedGenerator
from empax.interop.pretrained_encoders import LoadedEncoder
from empax.models.bart import bart_config
from empax.models.bert import BertConfig, BertEncoder
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.parts.exemplars.checks import check_vectors
from empax.parts.generator import checks, parts
from empax.parts.generator.parts import with_own_decoding
from empax.parts.generator.settings import DialogueSettings, GeneratorTaskSettings
from empax.parts.generator.trained import generator_to_export


def settings(folder, own):
    fields = {"num_beams": 3, "repetition_penalty": 1.5, "max_length": 99, "eos_token_id": [1, 7]}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return DialogueSettings(
        generator=GeneratorSettings(architecture="pretrained", pretrained=str(folder)),
        decoding=DecodeSettings(max_tokens=12, min_tokens=2),
        own_decoding=own,
    )


def test_the_folder_says_how_and_the_run_how_long(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tokenizer, model = SimpleNamespace(eos_id=7), EncoderDecoder(t5_config("t5-small"))
    off = settings(tmp_path, False)
    assert with_own_decoding(off, tokenizer, model) is off
    found = with_own_decoding(settings(tmp_path, True), tokenizer, model).decoding
    assert found == DecodeSettings(
        "beam", 12, 2, num_beams=3, num_return_sequences=1, repetition_penalty=1.5, more_eos_ids=(1,)
    )


def test_a_run_on_plain_texts_trains_on_the_token_that_its_folder_forces(tmp_path, monkeypatch):
    (tmp_path / "generation_config.json").write_text('{"forced_bos_token_id": 2}')
    tokenizer = train_bpe(["oh no"], vocab_size=290, special_tokens=SPECIAL_TOKENS)
    model = EncoderDecoder(bart_config("bart-base"))
    for name, made in (("run_tokenizer", tokenizer), ("load_generator", LoadedGenerator(model, None))):
        monkeypatch.setattr(parts, name, lambda *_, made=made, **__: made)
    generator = GeneratorSettings(architecture="pretrained", pretrained=str(tmp_path))
    for form, first, own in (("plain", [2], True), ("plain", [2], False), ("dialogue", [], True)):
        settings = DialogueSettings(generator=generator, form=form, own_decoding=own)
        run = SimpleNamespace(
            shared_settings=lambda _, settings=settings: settings,
            plan=SimpleNamespace(options=SimpleNamespace(mesh=MeshSettings())),
        )
        found = parts.GeneratorParts.of(run, with_params=False)
        (target,) = ContextExamples([Instance("a#2", ("no",), "oh no", "")], found.form(exemplars=False)).targets
        assert target == [*first, *tokenizer.encode("oh no"), 1]
        assert found.settings.decoding.first_token == (2 if first and own else None)
        exported = generator_to_export(found, "generator", {}, passages=0)
        assert exported.decoding.first_token == (2 if first else None)


def test_answers_begin_as_targets_do(monkeypatch):
    monkeypatch.setattr(checks, "check_layout", lambda _: None)

    def check(given, first_token=2, form="plain"):
        generator = GeneratorSettings(architecture="pretrained", pretrained="a/folder")
        shared = DialogueSettings(generator=generator, form=form, decoding=DecodeSettings(first_token=given))
        model = LoadedGenerator(EncoderDecoder(bart_config("bart-base")), None)
        made = parts.GeneratorParts(shared, PlannedTokenizer(5), model, MeshSettings(), first_token)
        monkeypatch.setattr(checks, "check_models", lambda _: made)
        evaluation = SimpleNamespace(settings=SimpleNamespace(decoding=None, stage="generator"))
        run = SimpleNamespace(
            shared="config.x", stage="evaluate", shared_settings=lambda _: shared, named=lambda _: evaluation
        )
        checks.check_evaluation(GeneratorTaskSettings(), run)

    with pytest.raises(ConfigError, match=r"config\.x\.decoding\.first_token = 3 begins every answer, but no target"):
        check(3)
    for allowed in ({"given": None}, {"given": 3, "first_token": 3}, {"given": 3, "form": "dialogue"}):
        check(**allowed)


def test_one_option_that_cannot_be_had_leaves_all_others_in_force(tmp_path, caplog):
    own = settings(tmp_path, True)
    tokenizer, model = SimpleNamespace(eos_id=7), EncoderDecoder(t5_config("t5-small"))
    expected = with_own_decoding(own, tokenizer, model)
    file = tmp_path / "generation_config.json"
    more = {"guidance_scale": 1.5, "stop_strings": ["x"], "num_return_sequences": 3, "forced_eos_token_id": 9}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    assert with_own_decoding(own, tokenizer, model, silent=True) == expected
    assert not caplog.records
    assert with_own_decoding(own, tokenizer, model) == expected
    assert all(f"{name} = {value!r}" in caplog.text for name, value in more.items())


def test_what_own_decoding_would_pass_over_is_refused(tmp_path):
    own = settings(tmp_path, True)
    with pytest.raises(ConfigError, match=r"decoding\.top_k = 5 has no effect: .* set own_decoding to False"):
        dataclasses.replace(own, decoding=DecodeSettings(max_tokens=12, top_k=5))
    with pytest.raises(ConfigError, match="own_decoding needs a pretrained generator"):
        DialogueSettings(own_decoding=True)


def test_vectors_that_are_compared_by_cosine_must_be_of_unit_length():
    plain = PlannedTokenizer(5)
    encoder = BertEncoder(BertConfig(vocab_size=5, d_model=4, num_heads=1, d_ff=4, num_layers=1))
    for similarity, normalize in [("cosine", True), ("dot", False), (None, False)]:
        found = LoadedEncoder(DualEncoder(encoder, "mean", normalize), plain, None, similarity)
        check_vectors(found, "m", where="x")
    with pytest.raises(
        ConfigError, match=r"m compares its vectors by cosine.*config\.reg\.retriever\.normalize = True"
    ):
        check_vectors(LoadedEncoder(DualEncoder(encoder), plain, None, "cosine"), "m", where="config.reg")
