"""A trained REG: G1 alone, or the retriever with G2."""

from __future__ import annotations

from collections.abc import Sequence

from empax.core.config import ConfigError, to_settings
from empax.core.run import RunContext
from empax.core.sharding import local_mesh
from empax.core.types import Params
from empax.data.store import load_instances
from empax.retrieval.index import load_index
from empax.systems.dialogue.parts import Parts, corpus_encoder_of
from empax.systems.dialogue.responder import Responder, Retrieval
from empax.systems.dialogue.settings import GeneratorStage
from empax.systems.dialogue.stages import corpus_encoder
from empax.systems.reg.settings import JointStage
from empax.systems.reg.stages import joint_task


def check_responder(run: RunContext, *, stage: str, index: str) -> None:
    """Whether `config.STAGE.stage` trains what answers, and a joint one has an index to search.

    Raises:
      ConfigError: it does not, or the stages come later.
    """
    run.earlier("stage", stage, tasks=("joint", "generator"))
    if run.task(stage).rpartition(".")[2] == "joint":
        run.earlier("index", index, kind="index")


def load_responder(run: RunContext, *, stage: str, index: str, buckets: Sequence[int]) -> Responder:
    """The trained system of a finished stage.

    Args:
      run: whose work directory holds the stages.
      stage: a "generator" or a "joint" stage.
      index: the index stage to search; unused by a "generator".
      buckets: source lengths to pad to.

    Raises:
      StaleIndexError: the index was made by another encoder than the stage's.
    """
    parts = Parts.of(run, with_params=False)
    section = dict(run.section(stage))
    kind = section["task"].rpartition(".")[2]
    params = parts.stage_params(run, stage)
    if kind == "generator":
        fields = {k: v for k, v in section.items() if k in GeneratorStage.__dataclass_fields__}
        task = parts.generator_task(to_settings(GeneratorStage, fields, where=f"config.{stage}"))
        return Responder(parts, task, parts.lowered(params), None, buckets)
    if kind != "joint":
        raise ConfigError(
            f"config.{run.stage}.stage = {stage!r} trains {kind!r}; it must train 'joint' or 'generator'."
        )
    fields = {k: v for k, v in section.items() if k in JointStage.__dataclass_fields__}
    settings = to_settings(JointStage, fields, where=f"config.{stage}")
    maker = _maker_of_index(run, parts, settings, stage, params)
    retrieval = Retrieval(
        corpus_encoder_of(parts, params["retriever"]),
        load_index(run.files.index(index), encoder_hash=maker, mesh=local_mesh()),
        parts.corpus(load_instances(run, "train")),
    )
    params = {**params, "generator": parts.lowered(params["generator"])}
    return Responder(parts, joint_task(parts, settings), params, retrieval, buckets)


def _maker_of_index(run: RunContext, parts: Parts, settings: JointStage, stage: str, params: Params) -> str:
    """Hash of the encoder whose passages the trained queries belong to."""
    if settings.passage_encoder == "trained":
        return corpus_encoder_of(parts, params["retriever"]).hash
    # Query-side training: the passages stay those of the retriever that joint training began with.
    if settings.retriever:
        return corpus_encoder_of(parts, parts.retriever_params(run, settings.retriever)).hash
    return corpus_encoder(run, "").hash
