"""The models inside checkpoints, one by one, for whoever writes them elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from empax.core.config import ConfigError
from empax.core.run import RunContext
from empax.core.types import Params
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import DecodeSettings
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.lora import LoraSettings
from empax.models.transformer import EncoderDecoder
from empax.systems.dialogue.parts import Parts


@dataclasses.dataclass(frozen=True)
class Trained:
    """One model with what it takes to use it.

    Attributes:
      stage, what: where it comes from.
      model: a generator or a DualEncoder.
      params: of `model`, as numpy arrays; where `adapters` is set, no more than the adapters.
      decoding: of a generator, how the run decodes.
      base: the pretrained model that training began with; empty = none.
      passages: of a generator, K where it reads several at once, else 0.
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
    max_tokens: int = 0
    lora: LoraSettings | None = None
    adapters: bool = False


def find_stage(run: RunContext, held: Mapping[str, tuple[str, ...]], *, stage: str, what: str) -> tuple[str, str, str]:
    """A stage of the run that trains a model, its task, and which of its models is meant.

    Args:
      run: whose config is searched.
      held: task of a stage, as its section names it, and the models that its checkpoint holds, the main one first.
      stage: name of the stage; empty = the last of them.
      what: name of the model; empty = the main one.

    Raises:
      ConfigError: there is no such stage, or it holds no such model.
    """
    stages = {name: task for name in run.config["run"] if (task := _task(run, name)) in held}
    stage = stage or next(reversed(stages), "")
    if stage not in stages:
        raise ConfigError(
            f"stage = {stage!r} trains no model of this run; those that do are {', '.join(stages) or 'none'}."
        )
    mine = held[stages[stage]]
    what = what or mine[0]
    if what not in mine:
        owners = ", ".join(name for name, task in stages.items() if what in held[task])
        raise ConfigError(f"stage {stage!r} holds no {what}, only its {mine[0]}; stages that do: {owners or 'none'}.")
    return stage, stages[stage], what


def trained_generator(parts: Parts, stage: str, params: Params, *, passages: int, adapters: bool = False) -> Trained:
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
        lora=settings.lora,
        adapters=adapters,
    )


def trained_retriever(parts: Parts, stage: str, params: Params) -> Trained:
    """A stage's retriever, without what its head adds to a score."""
    settings = parts.settings
    return Trained(
        stage,
        "retriever",
        parts.encoder.model,
        params["encoder"],
        cast(SubwordTokenizer, parts.encoder.tokenizer),
        settings.decoding,
        settings.retriever.pretrained,
        max_tokens=max(settings.layout.max_query_tokens, settings.layout.max_key_tokens),
    )


def _task(run: RunContext, name: str) -> str:
    """Of a training stage its task, with the system in front where it is another one's."""
    section = run.section(name)
    return section["task"].removeprefix(f"{run.config['system']}.") if section["kind"] == "train" else ""
