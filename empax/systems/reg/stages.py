"""REG's stages: from settings and the work directory to tasks with their examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.files import DataError, write_atomically
from empax.core.protocols import Task
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Batch, Params
from empax.data.batches import SequenceExamples
from empax.data.exemplars import (
    ContextExamples,
    Corpus,
    ExemplarBatch,
    ExemplarExamples,
    LabelledBatch,
    emotion_ids,
    encode_queries,
)
from empax.data.store import load_candidates, load_instances
from empax.retrieval.corpus import CorpusEncoder
from empax.retrieval.index import build_index, load_index
from empax.systems.reg.parts import Parts, corpus_encoder_of
from empax.systems.reg.settings import EmotionStage, GeneratorStage, JointStage, RetrieverStage
from empax.training.checkpoint import load_params


def build_generator(stage: GeneratorStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    splits = {split: load_instances(run, split) for split in ("train", "validation")}
    splits["validation"] = splits["validation"][: stage.max_validation_examples]
    options: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    if stage.index:
        corpus = parts.corpus(splits["train"])
        positions, ids = load_candidates(run, stage.index, "train")
        candidates = np.full((len(splits["train"]), parts.settings.passages), -1)
        candidates[positions] = ids[:, : parts.settings.passages]
        options["train"] = {
            "corpus": corpus,
            "candidates": candidates,
            "exemplar_probability": stage.exemplar_probability,
        }

    def examples(split: str) -> ContextExamples:
        return ContextExamples(
            splits[split],
            parts.form(exemplars=bool(stage.index)),
            **options[split],
        )

    initial: Callable[[Params], Params] | None = None
    if parts.settings.lora is not None:
        task = parts.with_lora(parts.generator_task(stage))
        if stage.start_from:
            initial = lambda _: load_params(run.files.stage(stage.start_from))  # noqa: E731
        frozen = task.freeze({"model": parts.generator.params}, {})
        return Assembly(task, examples("train"), examples("validation"), frozen=frozen, initial=initial)
    if stage.start_from:
        initial = lambda _: load_params(run.files.stage(stage.start_from))  # noqa: E731
    elif (pretrained := parts.generator.params) is not None:
        initial = lambda params: {**params, "model": {**params["model"], **pretrained}}  # noqa: E731
    return Assembly(parts.generator_task(stage), examples("train"), examples("validation"), initial=initial)


def _searched(
    parts: Parts, run: RunContext, index: str, split: str, corpus: Corpus, limit: int, **options: Any
) -> ExemplarExamples:
    """Examples of those instances of a split that have candidates, at most `limit` (0 = all)."""
    positions, ids = load_candidates(run, index, split)
    limit = limit or len(positions)
    instances = load_instances(run, split)
    return parts.exemplar_examples([instances[p] for p in positions[:limit]], corpus, ids[:limit], **options)


def _examples(
    parts: Parts, run: RunContext, stage: RetrieverStage | JointStage
) -> tuple[ExemplarExamples, ExemplarExamples]:
    corpus = parts.corpus(load_instances(run, "train"))
    embeddings = None
    if stage.passage_encoder == "frozen":
        embeddings = load_index(run.files.index(stage.index)).embeddings
    k = parts.settings.passages
    train = _searched(
        parts, run, stage.index, "train", corpus, stage.max_examples, num_random=k, key_embeddings=embeddings
    )
    # Validation shows the K retrieved ones and no trial: what is watched is the emotion head and G2's likelihood.
    held_out = _searched(
        parts, run, stage.index, "validation", corpus, stage.max_validation_examples, key_embeddings=embeddings
    )
    held_out.set_candidates(held_out.candidates[:, :k])
    if stage.candidates:
        train.set_candidates(train.candidates[:, : stage.candidates])
    return train, held_out


def build_emotions(stage: EmotionStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    start = parts.retriever_params(run, "")
    tokenizer, limit = parts.encoder.tokenizer, parts.settings.layout.max_query_tokens

    def examples(split: str, most: int) -> SequenceExamples:
        instances = [i for i in load_instances(run, split) if i.emotion]
        instances = instances[: most or None]
        labels = [[int(emotion)] for emotion in emotion_ids(instances)]
        queries = encode_queries(tokenizer, instances, limit)
        return SequenceExamples(queries, labels, pad_id=tokenizer.pad_id, max_target_tokens=1)

    return Assembly(
        parts.emotion_task(),
        examples("train", stage.max_examples),
        examples("validation", stage.max_validation_examples),
        initial=lambda params: {**params, "encoder": start["encoder"]},
    )


def build_retriever(stage: RetrieverStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    start = parts.retriever_params(run, stage.start_from)

    def initial(params: Params) -> Params:
        return start if stage.start_from else {**params, "encoder": start["encoder"]}

    return Assembly(
        parts.retriever_task(stage.distillation),
        train,
        validation,
        frozen={"generator": parts.stage_params(run, stage.generator)},
        initial=initial,
    )


def build_joint(stage: JointStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    judge = parts.stage_params(run, stage.generator)
    retriever = parts.retriever_params(run, stage.retriever)
    task, frozen = parts.joint_task(stage), {"generator": judge}
    refresh = Refresh(parts, run, stage, train)

    def initial(params: Params) -> Params:
        generator = judge if stage.warm_up else params["generator"]
        return {"retriever": retriever, "generator": generator}

    if parts.settings.lora is None:
        return Assembly(task, train, validation, frozen=frozen, initial=initial, on_refresh=refresh)
    adapted = parts.with_lora(task)
    first = load_params(run.files.stage(stage.generator))

    def initial_adapters(params: Params) -> Params:
        # G2 goes on with G1's adapters on the same weights, so that in the end there is one set of them.
        if not stage.warm_up:
            return {**params, "trained": {**params["trained"], "retriever": retriever}}
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
        if not path.exists():
            if params is None:
                raise DataError(f"{path} is gone, which step {step} made; delete {self.run.directory} to start over.")
            trained = params["trained"] if "adapters" in params else params
            ids = self._search(trained["retriever"])
            write_atomically(path, lambda temporary: np.save(temporary, ids))
        self.train.set_candidates(np.load(path))

    def _search(self, params: Params) -> np.ndarray:
        encoder = corpus_encoder_of(self.parts, params)
        index = load_index(self.run.files.index(self.stage.index))
        corpus = self.train.corpus
        if self.stage.passage_encoder == "trained":
            keys = encoder.embed_keys(corpus.instances, progress="refresh")
            index = build_index(keys, index.settings, groups=corpus.groups, encoder_hash=encoder.hash)
        queries = encoder.embed_queries(self.train.instances, progress="refresh")
        width = self.train.candidates.shape[1]
        return np.asarray(index.search(queries, width, query_groups=self.train.groups).ids)


def corpus_encoder(run: RunContext, stage: str) -> CorpusEncoder:
    """The encoder that index stages embed with: of training stage `stage`, or as pretrained if that is empty."""
    parts = Parts.of(run)
    return corpus_encoder_of(parts, parts.retriever_params(run, stage))


def sketch_generator(stage: GeneratorStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    return _sketch(parts, parts.generator_task(stage), _sketch_labelled(parts, batch_size, length), {})


def _sketch(parts: Parts, task: Task, batch: Any, frozen: Params) -> Sketch:
    """`task`; with `config.reg.lora` its adapters, and among what is frozen the weights that they sit on."""
    if parts.settings.lora is None:
        return Sketch(task, batch, frozen)
    adapted = parts.with_lora(task)
    return Sketch(adapted, batch, jax.eval_shape(adapted.freeze, _initial_shapes(task, batch), frozen))


def _initial_shapes(task: Task, batch: Any) -> Params:
    return jax.eval_shape(lambda batch: task.init(jax.random.key(0), batch), batch)


def _sketch_judge(parts: Parts, rows: int, length: int) -> Params:
    """The G1 that a stage after it holds beside what it trains."""
    task = parts.generator_task(GeneratorStage())
    return {"generator": _initial_shapes(task, _sketch_labelled(parts, rows, length))}


def _sketch_labelled(parts: Parts, rows: int, length: int) -> LabelledBatch:
    target = (rows, parts.settings.layout.max_target_tokens)
    return LabelledBatch(
        source=_shape(rows, length),
        source_mask=_shape(rows, length, kind=bool),
        target=_shape(*target),
        target_mask=_shape(*target, kind=bool),
        valid=_shape(rows, kind=bool),
        emotion=_shape(rows),
    )


def _sketch_batch(parts: Parts, stage: RetrieverStage | JointStage, rows: int, length: int) -> ExemplarBatch:
    """A batch as the loss sees it: explored, K candidates left."""
    layout, k = parts.settings.layout, parts.settings.passages
    frozen = stage.passage_encoder == "frozen"
    width = parts.encoder.model.encoder.config.d_model
    return ExemplarBatch(
        source=_shape(rows, k, length),
        source_mask=_shape(rows, k, length, kind=bool),
        target=_shape(rows, layout.max_target_tokens),
        target_mask=_shape(rows, layout.max_target_tokens, kind=bool),
        valid=_shape(rows, kind=bool),
        emotion=_shape(rows),
        query=_shape(rows, layout.max_query_tokens),
        query_mask=_shape(rows, layout.max_query_tokens, kind=bool),
        key=None if frozen else _shape(rows, k, layout.max_key_tokens),
        key_mask=None if frozen else _shape(rows, k, layout.max_key_tokens, kind=bool),
        key_embedding=_shape(rows, k, width, kind=jnp.float32) if frozen else None,
        candidate_mask=_shape(rows, k, kind=bool),
        key_emotion=_shape(rows, k),
        utilities=_shape(rows, k, kind=jnp.float32),
    )


def sketch_emotions(stage: EmotionStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    ids, mask = _shape(batch_size, length), _shape(batch_size, length, kind=bool)
    label = (batch_size, 1)
    batch = Batch(ids, mask, _shape(*label), _shape(*label, kind=bool), _shape(batch_size, kind=bool))
    return Sketch(parts.emotion_task(), batch)


def sketch_retriever(stage: RetrieverStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    return Sketch(parts.retriever_task(stage.distillation), batch, _sketch_judge(parts, batch_size, length))


def sketch_joint(stage: JointStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    return _sketch(parts, parts.joint_task(stage), batch, _sketch_judge(parts, batch_size, length))


def _shape(*sizes: int, kind: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, kind)


TASKS = {
    "generator": TaskSpec(GeneratorStage, build_generator, sketch_generator),
    "emotions": TaskSpec(EmotionStage, build_emotions, sketch_emotions),
    "retriever": TaskSpec(RetrieverStage, build_retriever, sketch_retriever),
    "joint": TaskSpec(JointStage, build_joint, sketch_joint),
}
