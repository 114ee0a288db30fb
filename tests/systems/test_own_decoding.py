"""A run that decodes as its pretrained generator's own folder says."""

import json
from types import SimpleNamespace

import pytest

from empax.core.config import ConfigError
from empax.decoding.settings import DecodeSettings
from empax.interop.pretrained import GeneratorSettings
from empax.models.t5 import t5_config
from empax.models.transformer import EncoderDecoder
from empax.systems.dialogue.parts import with_own_decoding
from empax.systems.dialogue.settings import DialogueSettings


def settings(folder, own):
    fields = {"num_beams": 3, "repetition_penalty": 1.5, "max_length": 99, "eos_token_id": [1, 7]}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return DialogueSettings(
        generator=GeneratorSettings(architecture="pretrained", pretrained=str(folder)),
        decoding=DecodeSettings(max_tokens=12, min_tokens=2, top_k=5),
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


def test_a_random_generator_has_no_folder():
    with pytest.raises(ConfigError, match="own_decoding is a pretrained generator's"):
        DialogueSettings(own_decoding=True)
