"""REG's stages: build tasks and their examples from the settings and the work directory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from empax.core import distributed
from empax.core.cache import is_sound, mark_of, seal
from empax.core.config import ConfigError
from empax.core.files import DataError, replacing, write_json
from empax.core.manifest import remedy
from empax.core.shapes import shapes_of
from empax.core.sharding import local_mesh
from empax.core.system import AnswerOptions, Assembly, RunContext, Sketch, load_encoder_of
from empax.core.types import Batch, Params
from empax.data.batches import SequenceExamples, draw
from empax.data.exemplars import ExemplarBatch, ExemplarExamples, emotion_ids, traits
from empax.data.store import check_candidates, check_prepared, has_emotions, load_instances
from empax.decoding.settings import DecodeSettings
from empax.models.dual_encoder import Towers
from empax.parts.exemplars import dense
from empax.parts.exemplars.checks import check_passages
from empax.parts.exemplars.parts import ExemplarSearch
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator import checks
from empax.parts.generator.answerer import Answerer
from empax.parts.generator.stages import (
    answerer_of,
    begun_with,
    generator_params,
    pretrained,
    sketch_frozen_generator,
    sketched,
    taught_heads,
    with_earlier,
)
from empax.retrieval.filters import find_exemplars, load_filter
from empax.retrieval.index import build_index, load_index
from empax.systems.reg.parts import EmotionParts, RegParts, emotion_parts
from empax.systems.reg.settings import (
    DenseTaskSettings,
    DistillationSettings,
    EmotionTaskSettings,
    JointTaskSettings,
    RetrieverTaskSettings,
)
from empax.systems.reg.tasks import DenseTask, EmotionTask, GuidedGenerator, Joint, RetrieverTask
from empax.systems.reg.utility import measure_utility
from empax.training.checkpoint import load_params
from empax.training.lora import trained_whole

RETRIEVER_TASKS = ("emotions", "dense", "retriever", "joint")
"""Tasks whose checkpoints hold a retriever."""

G1_TASKS = (*checks.GENERATOR_TASKS, "joint")
"""Tasks whose checkpoints hold a generator."""

DECODING = ("decoding", "own_decoding", "neighbours")
"""Settings of answers alone: the trials of distillation have a decoding of their own."""


def retriever_task(parts: RegParts, distillation: DistillationSettings) -> RetrieverTask:
    trial = DecodeSettings(method="greedy", max_tokens=distillation.explore_tokens)
    generator = parts.generator
    return RetrieverTask(
        parts.retriever, generator.fusion, generator.decoder(trial), distillation, generator.settings.passages
    )


def joint_task(parts: RegParts, stage: JointTaskSettings) -> Joint:
    # The head may be G1's, so it is evaluated and reported whatever this stage trains.
    generator = dataclasses.replace(parts.generator.generator_task(stage, fused=True), heads=("generator",))
    return Joint(retriever_task(parts, stage.distillation), generator, stage.retriever_weight)


def _examples(
    parts: RegParts, run: RunContext, stage: RetrieverTaskSettings | JointTaskSettings
) -> tuple[ExemplarExamples, ExemplarExamples]:
    retrieval, form, k = parts.retrieval, parts.generator.form(), parts.generator.settings.passages
    corpus = retrieval.corpus(load_instances(run, "train"), form)
    embeddings = load_index(run.files.index(stage.index)).embeddings if stage.passage_encoder == "frozen" else None
    find = functools.partial(retrieval.searched, run, stage.index, key_embeddings=embeddings)
    shown = {"num_random": k if stage.ranks else 0, "probability": stage.exemplar_probability}
    train = find("train", corpus, form, stage.max_examples, **shown)
    # Validation shows the K retrieved candidates without trials: its metrics are the emotions and G2's likelihood.
    held_out = find("validation", corpus, form, stage.max_validation_examples)
    held_out.set_candidates(held_out.candidates[:, :k])
    if stage.candidates or not stage.ranks:
        train.set_candidates(train.candidates[:, : stage.candidates if stage.ranks else k])
    return train, held_out


def check_emotions(stage: EmotionTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if contexts do not fit the buckets, or the training or validation split names no emotion."""
    check_prepared(run)
    dense.check_queries(run)
    for split in ("train", "validation"):
        if not has_emotions(run.plan.data, split):
            raise ConfigError(
                f"config.{run.stage}: no dialogue of the split {split!r} has an emotion; give them emotions, or take a "
                "recipe that learns none (configs/reg_transformer.py:apart, :no_retrieval)."
            )


def check_retriever(stage: RetrieverTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless the stages that the retriever learns from exist, and no context is cut in a trial."""
    _check_earlier(stage, run)
    checks.check_layout(run, exemplars=True)
    if run.named(run.stage).loop.best_metric == "loss" and not stage.distillation.emotion_weight:
        raise ConfigError(
            f"config.{run.stage}.best_metric = 'loss': no candidate is tried out on validation, where the loss is "
            "always 0; set it to None, which keeps the last parameters."
        )
    _check_exemplars(stage, run)


def check_joint(stage: JointTaskSettings, run: RunContext) -> None:
    """Checks joint training as `check_retriever` does, and that no setting is without effect."""
    _check_earlier(stage, run)
    checks.check_contrast(stage.contrast, run)
    checks.check_losses(
        stage.losses, run, lambda rows, length: _sketch_batch(RegParts.of(run, planned=True), stage, rows, length)
    )
    checks.check_layout(run)
    if stage.passage_encoder == "trained" and not stage.ranks:
        raise ConfigError(
            f"config.{run.stage}.passage_encoder = 'trained', but with retriever_weight = 0 no encoder is trained; set "
            "it to 'frozen'."
        )
    loop = run.named(run.stage).loop
    if loop.refresh_every_steps and not stage.ranks:
        raise ConfigError(
            f"config.{run.stage}.refresh_every_steps = {loop.refresh_every_steps}, but with retriever_weight = 0 the "
            "retriever never changes; set it to 0."
        )
    _check_exemplars(stage, run)


def check_evaluation(stage: JointTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless an evaluation reads whole contexts and several passages, of an index of its encoder."""
    checks.check_layout(run)
    check_passages(*checks.decoding_of(run))
    evaluation: Any = run.named(run.stage).settings
    _check_encoder(evaluation.index, evaluation.stage if stage.passage_encoder == "trained" else stage.retriever, run)


def _check_encoder(index: str, encoder: str, run: RunContext) -> None:
    """Raises ConfigError unless the stage `index` has the vectors of the stage `encoder`."""
    found = run.named(index).settings.encoder
    if found != encoder:
        raise ConfigError(
            f"config.{index}.encoder = {found!r}, but the queries of config.{run.stage} belong to passages of "
            f"{encoder or 'the pretrained encoder'!r}; set it to {encoder!r}, or name an index of that encoder."
        )


def _check_earlier(stage: RetrieverTaskSettings | JointTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless the stages that G1, the retriever and the candidates come from are earlier ones."""
    check_prepared(run)
    run.earlier("generator", stage.generator, tasks=G1_TASKS)
    if begun := getattr(stage, stage.begins):
        run.earlier(stage.begins, begun, tasks=RETRIEVER_TASKS)
    run.earlier("index", stage.index, kind="index")


def _check_exemplars(stage: RetrieverTaskSettings | JointTaskSettings, run: RunContext) -> None:
    """Raises ConfigError unless candidates suffice and those that the retriever ranks by vectors of their index fit."""
    frozen = stage.ranks and stage.passage_encoder == "frozen"
    if frozen:
        _check_encoder(stage.index, getattr(stage, stage.begins), run)
    settings = run.shared_settings(RetrievalSettings)
    checks.check_fusion(run)
    check_candidates(run, stage.index, max(settings.passages, stage.candidates))
    if 0 < stage.candidates < settings.passages:
        raise ConfigError(
            f"config.{run.stage}.candidates = {stage.candidates} must be at least passages = {settings.passages}, or 0."
        )
    if frozen and settings.emotion_share and not run.named(stage.index).settings.encoder:
        raise ConfigError(
            f"config.{run.stage}: the rows of index {stage.index!r} have no emotions, since its encoder is only "
            f"pretrained, but emotion_share = {settings.emotion_share}; set config.{run.stage}.{stage.begins} and "
            f"config.{stage.index}.encoder to the same trained retriever, or emotion_share to 0."
        )


def build_emotions(stage: EmotionTaskSettings, run: RunContext) -> Assembly:
    parts = emotion_parts(run)
    task, start = EmotionTask(parts.retriever), parts.retriever_params(run, "")
    pad_id = parts.retrieval.encoder.tokenizer.pad_id

    def examples(split: str, most: int) -> SequenceExamples:
        instances = draw([i for i in load_instances(run, split) if i.emotion], most)
        labels = [[int(emotion)] for emotion in emotion_ids(instances)]
        texts = parts.retrieval.query_text(instances)
        return SequenceExamples(texts, labels, pad_id=pad_id, max_target_tokens=1)

    return Assembly(
        task,
        examples("train", stage.max_examples),
        examples("validation", stage.max_validation_examples),
        initial=lambda _: task.trained(start),
    )


def dense_task(parts: EmotionParts, stage: DenseTaskSettings) -> DenseTask:
    return DenseTask(Towers(parts.retriever.encoder), stage.temperature, parts.retriever)


def check_dense(stage: DenseTaskSettings, run: RunContext) -> None:
    """Raises ConfigError if the stage to start from is missing; see also `dense.check_dense`."""
    dense.check_dense(stage.negatives, run)
    if stage.start_from:
        run.earlier("start_from", stage.start_from, tasks=RETRIEVER_TASKS)


def build_dense(stage: DenseTaskSettings, run: RunContext) -> Assembly:
    parts = emotion_parts(run)
    splits = (load_instances(run, split) for split in ("train", "validation"))
    examples = (dense.dense_examples(parts.retrieval, stage, instances) for instances in splits)
    return Assembly(
        dense_task(parts, stage), *examples, initial=lambda _: parts.retriever_params(run, stage.start_from)
    )


def build_retriever(stage: RetrieverTaskSettings, run: RunContext) -> Assembly:
    parts = RegParts.of(run)
    train, validation = _examples(parts, run, stage)
    task = retriever_task(parts, stage.distillation)
    judge = parts.generator.lowered(generator_params(parts.generator, run, stage.generator))

    def start() -> Params:
        # Loaded on request: what this holds stays in memory beside the training state.
        return parts.retriever_params(run, stage.start_from)

    def on_end(step: int, params: Params) -> None:
        del step
        both = {"before": start(), "after": params}
        loop, mesh = run.named(run.stage).loop, run.plan.options.mesh
        write_json(run.directory / "utility.json", measure_utility(task, judge, both, validation, loop, mesh))

    return Assembly(task, train, validation, frozen={"generator": judge}, initial=lambda _: start(), on_end=on_end)


def build_joint(stage: JointTaskSettings, run: RunContext) -> Assembly:
    parts = RegParts.of(run)
    made = parts.generator
    train, validation = _examples(parts, run, stage)
    judge = generator_params(made, run, stage.generator)
    task = joint_task(parts, stage)
    frozen = {"generator": made.lowered(judge)} if stage.ranks else {}
    # It outlives this function and must not keep the loaded weights beside the trained ones.
    refresh = Refresh(EmotionParts(parts.retrieval.without_params()), run, stage, train)

    def initial(params: Params) -> Params:
        generator = params["generator"]
        if stage.warm_up:
            generator = begun_with(generator, judge)
        elif made.settings.generator.loads_weights:  # as a first stage begins
            generator = {**generator, "model": {**generator["model"], **pretrained(run)}}
        return {"retriever": parts.retriever_params(run, stage.retriever), "generator": generator}

    if made.settings.lora is None:
        return Assembly(task, train, validation, frozen=frozen, initial=initial, on_refresh=refresh)
    adapted = made.with_lora(task)
    first = load_params(run.files.stage(stage.generator))

    def initial_adapters(params: Params) -> Params:
        retriever = parts.retriever_params(run, stage.retriever)
        # G2 continues with G1's adapters on the same weights, so that one set of adapters remains.
        if not stage.warm_up:
            return {**params, "trained": {**params["trained"], "retriever": retriever}}
        emotion = first["trained"].get("generator", first["trained"])["emotion"]
        adapters = first["adapters"].get("generator", first["adapters"])
        trained = {"retriever": retriever, "generator": {"emotion": emotion}}
        return {"adapters": {"generator": adapters}, "trained": trained}

    frozen = adapted.freeze({"generator": {"model": made.generator.params}}, frozen)
    return Assembly(adapted, train, validation, frozen=frozen, initial=initial_adapters, on_refresh=refresh)


@dataclasses.dataclass(frozen=True)
class Refresh:
    """Repeats the search for training contexts with the current retriever, and keeps the result for a resumed run."""

    parts: EmotionParts
    run: RunContext
    stage: JointTaskSettings
    train: ExemplarExamples

    def __call__(self, step: int, params: Params | None) -> None:
        path = self.run.directory / "refresh" / f"{step:08d}.npy"
        if params is None and not is_sound(path):
            raise DataError(f"{path}, written at step {step}, is gone or damaged. {remedy(self.run.stage)}")
        if distributed.is_writer() and params is not None and not is_sound(path):
            found = self._make(params)
            with replacing(path) as temporary:
                np.save(temporary, found)
            seal(path)
        distributed.wait_for(mark_of(path))
        self.train.set_candidates(np.load(path), order=False)

    def _make(self, params: Params) -> np.ndarray:
        encoder, mesh = self.parts.corpus_encoder(trained_whole(params)["retriever"]), local_mesh()
        index = load_index(self.run.files.index(self.stage.index), mesh=mesh)
        corpus, filter = self.train.corpus, load_filter(self.run.files.stage(self.stage.index))
        if self.stage.passage_encoder == "trained":
            keys = encoder.embed_keys(corpus.instances, progress="refresh", mesh=mesh)
            index = build_index(keys, index.settings, groups=corpus.groups, encoder_hash=encoder.hash, mesh=mesh)
            if filter is not None and filter.weights is not None:
                contexts = encoder.embed_queries(corpus.instances, progress="refresh", mesh=mesh)
                filter = filter.refitted(contexts)
        queries = encoder.embed_queries(self.train.instances, progress="refresh", mesh=mesh)
        asked, k = traits(self.train.instances), self.train.candidates.shape[1]
        return np.asarray(find_exemplars(index, queries, k, **asked, filter=filter).ids)


def _sketch_given(
    parts: RegParts, run: RunContext, stage: RetrieverTaskSettings | JointTaskSettings, rows: int, length: int
) -> dict[str, Any]:
    """Returns a `Sketch`'s batch before exploration, with M candidates and K random ones, and its longest answer."""
    if not stage.ranks:
        return {}  # nothing is explored
    k, index = parts.generator.settings.passages, run.plan.stages.get(stage.index)
    retrieved = stage.candidates or (k if index is None else index.settings.candidates)  # the plan may leave it out
    batch = dataclasses.replace(_sketch_batch(parts, stage, rows, length, retrieved + k), utilities=None)
    return {"given": batch, "answer_tokens": stage.distillation.explore_tokens}


def _sketch_batch(
    parts: RegParts, stage: RetrieverTaskSettings | JointTaskSettings, rows: int, length: int, candidates: int = 0
) -> ExemplarBatch:
    """Returns a batch as the loss sees it, explored, with K candidates; or with `candidates` of them."""
    settings = parts.generator.settings
    layout, k = settings.layout, candidates or settings.passages
    sizes = {"D": parts.retriever.size} if stage.passage_encoder == "frozen" else {"P": layout.max_key_tokens}
    sizes |= {"K": k, "F": k + parts.generator.form().apart, "S": length}
    whole = shapes_of(ExemplarBatch, B=rows, T=layout.max_target_tokens, Q=layout.max_query_tokens, **sizes)
    return dataclasses.replace(whole, response=None, response_mask=None)  # for decoding only


def sketch_emotions(stage: EmotionTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = RegParts.of(run, planned=True)
    return Sketch(EmotionTask(parts.retriever), shapes_of(Batch, B=batch_size, S=length, T=1))


def sketch_dense(stage: DenseTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = RegParts.of(run, planned=True)
    return Sketch(dense_task(parts, stage), dense.sketch_batch(parts.retrieval, stage, batch_size, length))


def sketch_retriever(stage: RetrieverTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = RegParts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    given = _sketch_given(parts, run, stage, batch_size, length)
    frozen = sketch_frozen_generator(parts.generator, batch_size, length)
    return Sketch(retriever_task(parts, stage.distillation), batch, frozen, **given)


def sketch_joint(stage: JointTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = RegParts.of(run, planned=True)
    batch = _sketch_batch(parts, stage, batch_size, length)
    frozen = sketch_frozen_generator(parts.generator, batch_size, length) if stage.ranks else {}
    made = sketched(parts.generator, joint_task(parts, stage), batch, frozen)
    return dataclasses.replace(made, **_sketch_given(parts, run, stage, batch_size, length))


def answer_joint(stage: JointTaskSettings, run: RunContext, options: AnswerOptions) -> Answerer:
    """Builds the answerer of a finished stage, the retriever with G2; an index of another encoder is refused."""
    parts = RegParts.of(run, with_params=False)
    made = parts.generator.trained_at(run.at(options.stage))
    params = made.stage_params(run, options.stage, options.params)
    encoder: Any = parts.corpus_encoder(params["retriever"])
    made_by = ""
    if not (stage.retriever or stage.ranks):  # untrained, so it knows no emotions either
        encoder = load_encoder_of(run, "")
    elif stage.passage_encoder == "frozen":
        # Query-side training: the passages keep the embeddings of the retriever that joint training started from.
        made_by = load_encoder_of(run, stage.retriever).hash
    search = ExemplarSearch.of(run, made, options.index, buckets=options.buckets, encoder=encoder, made_by=made_by)
    params = {**made.lowered(params["generator"]), "retriever": params["retriever"]}
    generator = vars(parts.generator.generator_task(stage, fused=True))
    task = GuidedGenerator(**{**generator, "heads": _heads(stage, run), "retriever": parts.retriever})
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
