"""The models inside checkpoints, one by one, for whoever writes them elsewhere."""

from __future__ import annotations

import dataclasses
from typing import cast

from empax.core.config import ConfigError
from empax.core.system import RunContext
from empax.core.types import Params
from empax.data.sources import ExemplarLayout
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.lora import LoraSettings
from empax.models.transformer import EncoderDecoder
from empax.parts.generator.parts import GeneratorParts


@dataclasses.dataclass(frozen=True)
class Trained:
    """One model with what it takes to use it.

    Attributes:
      stage, what: where it comes from.
      model: a generator or a DualEncoder.
      params: of `model`, as numpy arrays; where `adapters` is set, no more than the adapters.
      decoding: of a generator, how the run decodes.
      base: the pretrained model that training began with; empty = none.
      passages: of a generator, K where it reads exemplars, else 0.
      exemplars: how it reads them, see `data.sources.ExemplarLayout`.
      max_tokens: of a retriever, the most tokens that it reads of a text.
      lora: what adapters the stage has trained; None = the weights themselves.
      adapters: whether they are what `params` are; else they are merged into the weights.
    """

    stage: str
    what: str
    model: EncoderDecoder | DecoderOnly | DualEncoder
    params: Params
    tokenizer: SubwordTokenizer
    decoding: DecodeSettings
    base: str
    passages: int = 0
    exemplars: ExemplarLayout = "apart"
    max_tokens: int = 0
    lora: LoraSettings | None = None
    adapters: bool = False


def check_adapters(lacking: bool, run: RunContext, what: str) -> None:
    """Raises ConfigError if the stage that `run` is at is `lacking` adapters that are wanted."""
    if lacking:
        raise ConfigError(
            f"the {what} of stage {run.stage!r} has no adapters, it was trained whole: export it with --lora=merged "
            f"({run.shared}.lora makes a run train adapters of its generator)."
        )


def generator_to_export(
    parts: GeneratorParts, stage: str, params: Params, *, passages: int, adapters: bool = False
) -> Trained:
    """A stage's generator, reading `passages` at once; `params` are its adapters alone where `adapters` is set."""
    settings = parts.settings
    return Trained(
        stage,
        "generator",
        parts.generator.model,
        params,
        cast(SubwordTokenizer, parts.tokenizer),
        settings.decoding,
        settings.generator.pretrained,
        passages=passages,
        exemplars=settings.exemplars,
        lora=settings.lora,
        adapters=adapters,
    )
