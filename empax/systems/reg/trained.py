"""The models inside REG's checkpoints, one by one, for whoever writes them elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from empax.core.config import ConfigError
from empax.core.run import RunContext
from empax.core.types import Params
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.search import DecodeSettings
from empax.models.decoder_only import DecoderOnly
from empax.models.dual_encoder import DualEncoder
from empax.models.lora import LoraSettings
from empax.models.transformer import EncoderDecoder
from empax.systems.dialogue.parts import Parts
from empax.training.checkpoint import load_params

HELD = {"generator": ("generator",), "retriever": ("retriever",), "joint": ("generator", "retriever")}
"""Task of a stage → the models that its checkpoint holds, the main one first."""


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


def load_trained(
    run: RunContext, *, stage: str = "", what: Literal["", "generator", "retriever"] = "", adapters: bool = False
) -> Trained:
    """One model of a trained stage, without its emotion head.

    Args:
      run: whose work directory holds the stage.
      stage: a section of the config that trains a task of REG; empty = the last of them.
      what: which of the models that the stage holds; empty = the main one.
      adapters: gives the adapters alone, apart from the weights that they sit on, which are not even read.

    Raises:
      ConfigError: there is no such stage, or it holds no such model, or no adapters of it.
      CheckpointError: the stage has not been trained.
    """
    stages = {name: task for name in run.config["run"] if (task := _task(run, name)) in HELD}
    stage = stage or next(reversed(stages), "")
    if stage not in stages:
        raise ConfigError(
            f"stage = {stage!r} trains no model of this run; those that do are {', '.join(stages) or 'none'}."
        )
    held = HELD[stages[stage]]
    what = what or held[0]
    if what not in held:
        owners = ", ".join(name for name, task in stages.items() if what in HELD[task])
        raise ConfigError(f"stage {stage!r} holds no {what}, only its {held[0]}; stages that do: {owners or 'none'}.")
    saved = load_params(run.files.stage(stage))  # before any model is made: it is what is most often missing
    adapted = what == "generator" and "adapters" in saved
    if adapters and not adapted:
        raise ConfigError(
            f"the {what} of stage {stage!r} has no adapters, it was trained whole: export it with --lora=merged "
            "(config.reg.lora makes a run train adapters of its generator)."
        )
    parts = Parts.of(run, with_params=False)
    settings = parts.settings
    params = saved["adapters"] if adapters else parts.stage_params(run, stage)
    params = params.get(what, params)  # of a joint stage, its part
    if what == "generator":
        passages = settings.passages if stages[stage] == "joint" else 0
        tokenizer = cast(SubwordTokenizer, parts.tokenizer)
        model, base = parts.generator.model, settings.generator.pretrained
        return Trained(
            stage, what, model, params["model"], tokenizer, settings.decoding, base, passages=passages,
            lora=settings.lora if adapted else None, adapters=adapters,
        )  # fmt: skip
    tokenizer = cast(SubwordTokenizer, parts.encoder.tokenizer)
    model, base = parts.encoder.model, settings.retriever.pretrained
    longest = max(settings.layout.max_query_tokens, settings.layout.max_key_tokens)
    return Trained(stage, what, model, params["encoder"], tokenizer, settings.decoding, base, max_tokens=longest)


def _task(run: RunContext, name: str) -> str:
    section = run.section(name)
    return section["task"].removeprefix("reg.") if section["kind"] == "train" else ""
