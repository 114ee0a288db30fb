"""A trained REG: its answerer (the retriever with G2) and its retriever for export."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from empax.core.system import AnswerOptions, RunContext, load_encoder_of
from empax.data.tokenizers import SubwordTokenizer
from empax.parts.exemplars.parts import ExemplarSearch
from empax.parts.generator.answerer import Answerer
from empax.parts.generator.stages import answerer_of, taught_heads, with_earlier
from empax.parts.generator.trained import Trained, check_adapters
from empax.systems.reg.parts import RegParts, emotion_parts
from empax.systems.reg.settings import (
    DenseTaskSettings,
    EmotionTaskSettings,
    JointTaskSettings,
    RetrieverTaskSettings,
)
from empax.systems.reg.stages import joint_task
from empax.training.checkpoint import load_params
from empax.training.lora import trained_whole


def answer_joint(stage: JointTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage, the retriever with G2; an index of another encoder is refused."""
    parts = RegParts.of(run, with_params=False)
    made = parts.generator.trained_at(run.at(options.stage))
    params = made.stage_params(run, options.stage)
    encoder: Any = parts.corpus_encoder(params["retriever"])
    made_by = ""
    if not (stage.retriever or stage.ranks):  # untrained, so it knows no emotions either
        encoder = load_encoder_of(run, "")
    elif stage.passage_encoder == "frozen":
        # Query-side training: the passages keep the embeddings of the retriever that joint training started from.
        made_by = load_encoder_of(run, stage.retriever).hash
    search = ExemplarSearch.of(run, made, options.index, buckets=options.buckets, encoder=encoder, made_by=made_by)
    params = {**params, "generator": made.lowered(params["generator"])}
    task = joint_task(parts, stage)
    task = dataclasses.replace(task, heads=_heads(stage, run))
    return answerer_of(made, task, params, search, options, run)


def _heads(stage: JointTaskSettings, run: RunContext) -> tuple[str, ...]:
    """Returns the emotion heads that this stage or an earlier one trained."""
    retrievers = (_teaches_emotions(one) for one in with_earlier(stage, run, "retriever"))
    taught = (*taught_heads(stage, run), *(("retriever",) if any(retrievers) else ()))
    return (*taught, "both") if len(taught) == 2 else taught


def _teaches_emotions(stage: Any) -> bool:
    """Whether a stage trains the retriever's emotion head."""
    if isinstance(stage, JointTaskSettings | RetrieverTaskSettings):
        return stage.ranks and stage.distillation.emotion_weight > 0
    return isinstance(stage, EmotionTaskSettings)


def trained_retriever(
    stage: DenseTaskSettings | RetrieverTaskSettings | JointTaskSettings, run: RunContext, adapters: bool
) -> Trained:
    """Returns the retriever of the trained stage of `run`, without its emotion head. `adapters` are refused."""
    params = trained_whole(load_params(run.directory))
    check_adapters(adapters, run, "retriever")
    parts = emotion_parts(run, with_params=False).retrieval
    settings = parts.settings
    return Trained(
        run.stage,
        "retriever",
        parts.encoder.model,
        params.get("retriever", params)["encoder"],
        cast(SubwordTokenizer, parts.encoder.tokenizer),
        settings.decoding,
        settings.retriever.pretrained,
        max_tokens=max(settings.layout.max_query_tokens, settings.layout.max_key_tokens),
    )
