"""The single models of checkpoints, for export."""

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
    """A trained model with everything needed to use it.

    Attributes:
      stage, what: its stage and kind.
      model: a generator or a DualEncoder.
      params: parameters of `model`, as numpy arrays; if `adapters` is set, the adapters alone.
      decoding: the run's decoding of a generator.
      base: the pretrained model that training started from; empty = none.
      passages: K of a generator that reads exemplars, else 0.
      exemplars: layout of these exemplars, see `data.sources.ExemplarLayout`.
      before: text that starts each source of a generator.
      plain: whether a generator was trained on plain texts, without tags or an instruction.
      max_tokens: maximum tokens of a text for a retriever.
      lora: settings of the adapters that the stage trained; None = it trained the weights.
      adapters: whether `params` are the adapters; else they are merged into the weights.
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
    before: str = ""
    plain: bool = False
    max_tokens: int = 0
    lora: LoraSettings | None = None
    adapters: bool = False


def check_adapters(lacking: bool, run: RunContext, what: str) -> None:
    """Raises ConfigError if the current stage of `run` is `lacking` the requested adapters."""
    if lacking:
        raise ConfigError(
            f"the {what} of stage {run.stage!r} has no adapters: it was trained whole. Export it with --lora=merged."
        )


def generator_to_export(
    parts: GeneratorParts, stage: str, params: Params, *, passages: int, adapters: bool = False
) -> Trained:
    """Returns a stage's generator, which reads `passages` at once; `params` are adapters alone if `adapters` is set.

    Its decoding forces the token that targets began with in training, if there is one: likelihoods and further training
    outside the run begin with what decoding forces.
    """
    settings, decoding = parts.settings, parts.settings.decoding
    if parts.first_token is not None:
        decoding = dataclasses.replace(decoding, first_token=parts.first_token)
    return Trained(
        stage,
        "generator",
        parts.generator.model,
        params,
        cast(SubwordTokenizer, parts.tokenizer),
        decoding,
        settings.generator.pretrained,
        passages=passages,
        exemplars=settings.exemplars,
        plain=settings.form == "plain",
        lora=settings.lora,
        adapters=adapters,
    )
