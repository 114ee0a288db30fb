"""REG's stages: from settings and the work directory to tasks with their examples."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from empax.core import distributed
from empax.core.cache import is_sound, kept_array, mark_of
from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.core.manifest import remedy
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec
from empax.core.sharding import local_mesh
from empax.core.types import Batch, Params
from empax.data import own
from empax.data.batches import SequenceExamples
from empax.data.exemplars import (
    ExemplarBatch,
    ExemplarExamples,
    emotion_ids,
    encode_queries,
)
from empax.data.store import check_candidates, check_prepared, load_instances
from empax.decoding.settings import DecodeSettings
from empax.models.heads import EMOTION_HEAD
from empax.retrieval.index import build_index, load_index
from empax.systems.dialogue.checks import GENERATOR_TASKS, RETRIEVER_TASKS, dialogue_settings
from empax.systems.dialogue.parts import Parts, corpus_encoder_of
from empax.systems.dialogue.stages import GENERATOR, searched, shape, sketch_judge, sketched
from empax.systems.reg.settings import DistillationSettings, EmotionStage, JointStage, RetrieverStage
from empax.systems.reg.tasks import EmotionTask, Joint, Retriever
from empax.training.checkpoint import load_params

NO_EMOTIONS = (
    "config.{stage}: no dialogue of the split {split!r} has an emotion; give them emotions, or take a recipe that "
    "learns none (configs/reg_transformer.py:semantic, :no_retrieval)."
)


def emotion_task(parts: Parts) -> EmotionTask:
    return EmotionTask(parts.retriever)


def retriever_task(parts: Parts, distillation: DistillationSettings) -> Retriever:
    trial = DecodeSettings(method="greedy", max_tokens=distillation.explore_tokens)
    passages = parts.settings.passages
    return Retriever(parts.retriever, parts.reader, parts.decoder(trial), distillation, passages)


def joint_task(parts: Parts, stage: JointStage) -> Joint:
    return Joint(
        retriever_task(parts, stage.distillation),
        parts.fusion,
        EMOTION_HEAD,
        parts.decoder(parts.settings.decoding),
        retriever_weight=stage.retriever_weight,
        emotion_weight=stage.emotion_weight,
        label_smoothing=stage.label_smoothing,
        logits_at_once=parts.settings.logits_at_once,
    )


def _examples(
    parts: Parts, run: RunContext, stage: RetrieverStage | JointStage
) -> tuple[ExemplarExamples, ExemplarExamples]:
    corpus = parts.corpus(load_instances(run, "train"))
    embeddings = None
    if stage.passage_encoder == "frozen":
        embeddings = load_index(run.files.index(stage.index)).embeddings
        if embeddings.shape[1] != parts.retriever.size:
            raise ConfigError(
                f"config.{run.stage}: index {stage.index!r} has vectors of {embeddings.shape[1]}, the retriever of "
                f"{parts.retriever.size}, since emotion_share = {parts.settings.emotion_share}; name an index of a "
                "trained retriever, or set emotion_share to 0."
            )
    k = parts.settings.passages
    train = searched(
        parts, run, stage.index, "train", corpus, stage.max_examples, num_random=k, key_embeddings=embeddings
    )
    # Validation shows the K retrieved ones and no trial: what is watched is the emotion head and G2's likelihood.
    held_out = searched(
        parts, run, stage.index, "validation", corpus, stage.max_validation_examples, key_embeddings=embeddings
    )
    held_out.set_candidates(held_out.candidates[:, :k])
    if stage.candidates:
        train.set_candidates(train.candidates[:, : stage.candidates])
    return train, held_out


def check_emotions(stage: EmotionStage, run: RunContext) -> None:
    """Raises ConfigError if a split that the stage reads names no emotion."""
    del stage
    check_prepared(run)
    data = run.section("data")
    if data.get("name") != "jsonl":  # the other corpora have emotions
        return
    for split in ("train", "validation"):
        if not own.has_emotions(data["dir"], split):
            raise ConfigError(NO_EMOTIONS.format(stage=run.stage, split=split))


def check_retriever(stage: RetrieverStage, run: RunContext) -> None:
    """Whether the stages that the retriever learns from are there.

    Raises:
      ConfigError: they are not, come later, or leave something else.
    """
    check_prepared(run)
    run.earlier("generator", stage.generator, tasks=GENERATOR_TASKS)
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=RETRIEVER_TASKS)
    _check_exemplars(stage, run)


def check_joint(stage: JointStage, run: RunContext) -> None:
    """As `check_retriever`, of joint training."""
    check_prepared(run)
    run.earlier("generator", stage.generator, tasks=GENERATOR_TASKS)
    if stage.retriever:
        run.earlier("retriever", stage.retriever, tasks=RETRIEVER_TASKS)
    _check_exemplars(stage, run)


def _check_exemplars(stage: RetrieverStage | JointStage, run: RunContext) -> None:
    settings = dialogue_settings(run)
    if isinstance(stage, JointStage) and settings.decoding.reads_source:
        raise ConfigError(
            "encoder_no_repeat_ngram and encoder_repetition_penalty look at one source, and this generator reads "
            f"several passages; set them to 0 and 1 in config.{run.config['system']}.decoding."
        )
    check_candidates(run, stage.index, ("train", "validation"), settings.passages)
    if 0 < stage.candidates < settings.passages:
        raise ConfigError(
            f"config.{run.stage}.candidates = {stage.candidates} must be at least passages = {settings.passages}, or 0."
        )
    frozen = stage.passage_encoder == "frozen"
    if frozen and settings.emotion_share and not run.section(stage.index).get("encoder", ""):
        raise ConfigError(
            f"config.{run.stage}: the rows of index {stage.index!r} know no emotions, since its encoder is as "
            f"pretrained, but emotion_share = {settings.emotion_share}; name an index of a trained retriever, or set "
            "emotion_share to 0."
        )


def build_emotions(stage: EmotionStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    task, start = emotion_task(parts), parts.retriever_params(run, "")
    tokenizer, layout = parts.encoder.tokenizer, parts.settings.layout

    def examples(split: str, most: int) -> SequenceExamples:
        instances = [i for i in load_instances(run, split) if i.emotion]
        if not instances:
            raise ConfigError(NO_EMOTIONS.format(stage=run.stage, split=split))
        instances = instances[: most or None]
        labels = [[int(emotion)] for emotion in emotion_ids(instances)]
        texts = encode_queries(tokenizer, instances, layout.max_query_tokens)
        return SequenceExamples(texts, labels, pad_id=tokenizer.pad_id, max_target_tokens=1)

    return Assembly(
        task,
        examples("train", stage.max_examples),
        examples("validation", stage.max_validation_examples),
        initial=lambda _: task.trained(start),
    )


def build_retriever(stage: RetrieverStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    return Assembly(
        retriever_task(parts, stage.distillation),
        train,
        validation,
        frozen={"generator": parts.lowered(parts.stage_params(run, stage.generator))},
        # Loaded when it is asked for: what this holds stays in memory beside what training keeps.
        initial=lambda _: parts.retriever_params(run, stage.start_from),
    )


def build_joint(stage: JointStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    judge = parts.stage_params(run, stage.generator)
    task, frozen = joint_task(parts, stage), {"generator": parts.lowered(judge)}
    # It outlives this, and must not hold the weights as they were loaded beside those that training keeps.
    lasting = dataclasses.replace(
        parts,
        generator=dataclasses.replace(parts.generator, params=None),
        encoder=dataclasses.replace(parts.encoder, params=None),
    )
    refresh = Refresh(lasting, run, stage, train)

    def initial(params: Params) -> Params:
        generator = judge if stage.warm_up else params["generator"]
        return {"retriever": parts.retriever_params(run, stage.retriever), "generator": generator}

    if parts.settings.lora is None:
        return Assembly(task, train, validation, frozen=frozen, initial=initial, on_refresh=refresh)
    adapted = parts.with_lora(task)
    first = load_params(run.files.stage(stage.generator))

    def initial_adapters(params: Params) -> Params:
        retriever = parts.retriever_params(run, stage.retriever)
        # G2 goes on with G1's adapters on the same weights, so that in the end there is one set of them.
        if not stage.warm_up:
            kept = parts.generator.adapters
            adapters = params["adapters"] if kept is None else {"generator": {"model": kept}}
            return {"adapters": adapters, "trained": {**params["trained"], "retriever": retriever}}
        trained = {"retriever": retriever, "generator": {"emotion": first["trained"]["emotion"]}}
        return {"adapters": {"generator": first["adapters"]}, "trained": trained}

    frozen = adapted.freeze({"generator": {"model": parts.generator.params}}, frozen)
    return Assembly(adapted, train, validation, frozen=frozen, initial=initial_adapters, on_refresh=refresh)


@dataclasses.dataclass(frozen=True)
class Refresh:
    """Searches the training contexts anew with the current retriever, and keeps the result for a resumed run."""

    parts: Parts
    run: RunContext
    stage: JointStage
    train: ExemplarExamples

    def __call__(self, step: int, params: Params | None) -> None:
        path = self.run.directory / "refresh" / f"{step:08d}.npy"
        if params is None and not is_sound(path):
            raise DataError(f"{path}, which step {step} made, is gone or damaged. {remedy(self.run.stage)}")
        if distributed.is_writer() and params is not None:
            kept_array(path, functools.partial(self._make, params))
        distributed.wait_for(mark_of(path))
        self.train.set_candidates(np.load(path))

    def _make(self, params: Any) -> np.ndarray:
        trained = params["trained"] if "adapters" in params else params
        return self._search(trained["retriever"])

    def _search(self, params: Params) -> np.ndarray:
        encoder, mesh = corpus_encoder_of(self.parts, params), local_mesh()
        index = load_index(self.run.files.index(self.stage.index), mesh=mesh)
        corpus = self.train.corpus
        if self.stage.passage_encoder == "trained":
            keys = encoder.embed_keys(corpus.instances, progress="refresh", mesh=mesh)
            index = build_index(keys, index.settings, groups=corpus.groups, encoder_hash=encoder.hash, mesh=mesh)
        queries = encoder.embed_queries(self.train.instances, progress="refresh", mesh=mesh)
        width = self.train.candidates.shape[1]
        return np.asarray(index.search(queries, width, query_groups=self.train.groups).ids)


def _sketch_given(
    parts: Parts, run: RunContext, stage: RetrieverStage | JointStage, rows: int, length: int
) -> dict[str, Any]:
    """Of a `Sketch`: a batch before anything is tried out, M candidates and K random ones, and the longest answer."""
    k = parts.settings.passages
    try:
        retrieved = stage.candidates or run.config[stage.index]["candidates"]
    except KeyError:  # the plan leaves the index out
        retrieved = k
    batch = dataclasses.replace(_sketch_batch(parts, stage, rows, length, retrieved + k), utilities=None)
    return {"given": batch, "answer_tokens": stage.distillation.explore_tokens}


def _sketch_batch(
    parts: Parts, stage: RetrieverStage | JointStage, rows: int, length: int, candidates: int = 0
) -> ExemplarBatch:
    """A batch as the loss sees it: explored, K candidates left; or with `candidates` of them."""
    layout, k = parts.settings.layout, candidates or parts.settings.passages
    frozen = stage.passage_encoder == "frozen"
    width = parts.retriever.size
    return ExemplarBatch(
        source=shape(rows, k, length),
        source_mask=shape(rows, k, length, kind=bool),
        target=shape(rows, layout.max_target_tokens),
        target_mask=shape(rows, layout.max_target_tokens, kind=bool),
        valid=shape(rows, kind=bool),
        emotion=shape(rows),
        query=shape(rows, layout.max_query_tokens),
        query_mask=shape(rows, layout.max_query_tokens, kind=bool),
        key=None if frozen else shape(rows, k, layout.max_key_tokens),
        key_mask=None if frozen else shape(rows, k, layout.max_key_tokens, kind=bool),
        key_embedding=shape(rows, k, width, kind=jnp.float32) if frozen else None,
        candidate_mask=shape(rows, k, kind=bool),
        key_emotion=shape(rows, k),
        utilities=shape(rows, k, kind=jnp.float32),
    )


def sketch_emotions(stage: EmotionStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    ids, mask = shape(batch_size, length), shape(batch_size, length, kind=bool)
    label = (batch_size, 1)
    batch = Batch(ids, mask, shape(*label), shape(*label, kind=bool), shape(batch_size, kind=bool))
    return Sketch(emotion_task(parts), batch)


def sketch_retriever(stage: RetrieverStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    given = _sketch_given(parts, run, stage, batch_size, length)
    return Sketch(retriever_task(parts, stage.distillation), batch, sketch_judge(parts, batch_size, length), **given)


def sketch_joint(stage: JointStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    made = sketched(parts, joint_task(parts, stage), batch, sketch_judge(parts, batch_size, length))
    return dataclasses.replace(made, **_sketch_given(parts, run, stage, batch_size, length))


TASKS = {
    "generator": GENERATOR,
    "emotions": TaskSpec(EmotionStage, check_emotions, build_emotions, sketch_emotions),
    "retriever": TaskSpec(RetrieverStage, check_retriever, build_retriever, sketch_retriever),
    "joint": TaskSpec(JointStage, check_joint, build_joint, sketch_joint),
}
