"""REG's stages: from settings and the work directory to tasks with their examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.config import to_settings
from empax.core.files import DataError, hash_json, write_atomically
from empax.core.protocols import Tokenizer
from empax.core.run import Assembly, RunContext, Sketch, TaskSpec
from empax.core.tree import hash_tree
from empax.core.types import EMOTIONS, Instance, Params
from empax.data.chat import PLAIN, chat_template
from empax.data.exemplars import (
    ContextExamples,
    Corpus,
    ExemplarBatch,
    ExemplarExamples,
    LabelledBatch,
)
from empax.data.sources import ChatForm, LayoutSettings, SourceForm, TaggedForm
from empax.data.store import load_candidates, load_instances, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.search import DecodeSettings
from empax.interop.pretrained import (
    EncoderSettings,
    GeneratorSettings,
    LoadedEncoder,
    LoadedGenerator,
    load_encoder,
    load_generator,
)
from empax.models.decoder_only import DecoderOnly
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.models.heads import ClassificationHead
from empax.models.prompted import FusionInPrompt, PromptedDecoder
from empax.retrieval.corpus import CorpusEncoder
from empax.retrieval.index import build_index, load_index
from empax.systems.reg.tasks import Decoder, DistillationSettings, Fusion, Generator, Joint, Reader, Retriever
from empax.training.checkpoint import load_params


@dataclasses.dataclass(frozen=True)
class RegSettings:
    """What all stages share: `config.reg`.

    Attributes:
      attributes: emotion attributes in front of everything; False is the paper's w/o EA.
      passages: K, how many exemplars G2 reads.
    """

    generator: GeneratorSettings = dataclasses.field(default_factory=GeneratorSettings)
    retriever: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    layout: LayoutSettings = dataclasses.field(default_factory=LayoutSettings)
    decoding: DecodeSettings = dataclasses.field(default_factory=DecodeSettings)
    attributes: bool = True
    passages: int = 6


@dataclasses.dataclass(frozen=True)
class GeneratorStage:
    """Stage 1.

    Attributes:
      index: the index stage whose candidates G1 is shown; empty = none.
      exemplar_probability: how often an example with candidates shows one of them.
      emotion_weight: of the 32-way head over the pooled encoding; ours.
      start_from: an earlier generator stage whose parameters to go on from; empty = initialise.
    """

    index: str = ""
    exemplar_probability: float = 0.5
    emotion_weight: float = 0.1
    label_smoothing: float = 0.0
    start_from: str = ""
    max_validation_examples: int = 1000


@dataclasses.dataclass(frozen=True)
class RetrieverStage:
    """Stage 2.

    Attributes:
      generator: the stage that trained G1.
      index: the index stage whose candidates are tried out.
      candidates: M, how many of those are re-scored with the current encoders, K being kept (0 = all that it found).
      passage_encoder: "trained" reads the candidates in every step, gradient and all; "frozen" takes their embeddings
        from the index and trains the query side alone.
    """

    distillation: DistillationSettings = dataclasses.field(default_factory=DistillationSettings)
    generator: str = "generator"
    index: str = "index"
    candidates: int = 0
    passage_encoder: Literal["trained", "frozen"] = "trained"
    max_examples: int = 0
    max_validation_examples: int = 256


@dataclasses.dataclass(frozen=True)
class JointStage:
    """Stage 3.

    Attributes:
      generator: the stage that trained G1: it judges candidates, and G2 starts from it.
      warm_up: False starts G2 from nothing (the paper's "scratch" row; the judge stays G1).
      retriever: the stage that trained the retriever; empty = as pretrained.
      retriever_weight: alpha of Eq. 7.
      candidates, passage_encoder: see RetrieverStage.
    """

    distillation: DistillationSettings = dataclasses.field(default_factory=DistillationSettings)
    generator: str = "generator"
    warm_up: bool = True
    retriever: str = "retriever"
    index: str = "reindex"
    retriever_weight: float = 0.2
    emotion_weight: float = 0.1
    label_smoothing: float = 0.0
    candidates: int = 0
    passage_encoder: Literal["trained", "frozen"] = "frozen"
    max_examples: int = 0
    max_validation_examples: int = 512


HEAD = ClassificationHead(num_classes=len(EMOTIONS))


@dataclasses.dataclass(frozen=True)
class Parts:
    """The pieces that every stage of REG is put together from."""

    settings: RegSettings
    tokenizer: Tokenizer
    generator: LoadedGenerator
    encoder: LoadedEncoder

    @classmethod
    def of(cls, run: RunContext, *, with_params: bool = True, planned: bool = False) -> Parts:
        settings = to_settings(RegSettings, run.section("reg"), where="config.reg")
        tokenizer = run_tokenizer(run, planned=planned)
        with_params = with_params and not planned
        return cls(
            settings,
            tokenizer,
            load_generator(settings.generator, tokenizer, with_params=with_params),
            load_encoder(settings.retriever, tokenizer, with_params=with_params),
        )

    def decoder(self, settings: DecodeSettings) -> Decoder:
        t = self.tokenizer
        return Decoder(settings, start_id=self.form().start_id, eos_id=t.eos_id, pad_id=t.pad_id)

    def generator_task(self, stage: GeneratorStage) -> Generator:
        return Generator(
            self.reader,
            HEAD,
            self.decoder(self.settings.decoding),
            emotion_weight=stage.emotion_weight,
            label_smoothing=stage.label_smoothing,
        )

    def retriever_task(self, distillation: DistillationSettings) -> Retriever:
        trial = DecodeSettings(method="greedy", max_tokens=distillation.explore_tokens)
        return Retriever(
            self.encoder.model, HEAD, self.reader, self.decoder(trial), distillation, self.settings.passages
        )

    def joint_task(self, stage: JointStage) -> Joint:
        return Joint(
            self.retriever_task(stage.distillation),
            self.fusion,
            HEAD,
            self.decoder(self.settings.decoding),
            retriever_weight=stage.retriever_weight,
            emotion_weight=stage.emotion_weight,
            label_smoothing=stage.label_smoothing,
        )

    def retriever_params(self, run: RunContext, stage: str) -> Params:
        """The retriever of a training stage; empty: as pretrained, or random from the run's seed."""
        if stage:
            params = load_params(run.files.stage(stage))
            return params.get("retriever", params)  # of a joint stage, its retriever
        rng = jax.random.key(run.seed)
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        encoder = self.encoder.params
        if encoder is None:
            # Compiled as one: op by op it takes seconds.
            encoder = jax.jit(self.encoder.model.init)(rng, ids, mask)["params"]
        width = jnp.zeros((1, self.encoder.model.encoder.config.d_model))
        return {"encoder": encoder, "emotion": HEAD.init(rng, width)["params"]}

    def form(self, *, exemplars: bool = True) -> SourceForm:
        """How the generator is shown its sources; without `exemplars`, rows have no room for one."""
        settings, tokenizer = self.settings, self.tokenizer
        if not isinstance(self.generator.model, DecoderOnly):
            return TaggedForm(tokenizer, settings.layout, settings.attributes)
        template = PLAIN
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.chat_template:
            names = tokenizer.names
            template = chat_template(
                tokenizer.chat_template, bos_token=names["start_token"], eos_token=names["eos_token"]
            )
        return ChatForm(tokenizer, settings.layout, settings.attributes, template, exemplars)

    @property
    def reader(self) -> Reader:
        """The generator as tasks see it."""
        model = self.generator.model
        if isinstance(model, DecoderOnly):
            form = self.form()
            return PromptedDecoder(model, form.prefix, form.start_id)
        return model

    @property
    def fusion(self) -> Fusion:
        """The generator reading several exemplars."""
        reader = self.reader
        if isinstance(reader, PromptedDecoder):
            return FusionInPrompt(reader, self.form().split)
        return FusionInDecoder(reader)

    def corpus(self, instances: Sequence[Instance]) -> Corpus:
        return Corpus.of(instances, self.form(), self.encoder.tokenizer)

    def exemplar_examples(
        self, instances: Sequence[Instance], corpus: Corpus, candidates: np.ndarray, **options: Any
    ) -> ExemplarExamples:
        return ExemplarExamples(
            instances,
            corpus,
            candidates,
            self.form(),
            self.encoder.tokenizer,
            **options,
        )


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


def build_retriever(stage: RetrieverStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    start = parts.retriever_params(run, "")

    def initial(params: Params) -> Params:
        return {**params, "encoder": start["encoder"]}

    return Assembly(
        parts.retriever_task(stage.distillation),
        train,
        validation,
        frozen={"generator": load_params(run.files.stage(stage.generator))},
        initial=initial,
    )


def build_joint(stage: JointStage, run: RunContext) -> Assembly:
    parts = Parts.of(run)
    train, validation = _examples(parts, run, stage)
    judge = load_params(run.files.stage(stage.generator))
    retriever = parts.retriever_params(run, stage.retriever)

    def initial(params: Params) -> Params:
        generator = judge if stage.warm_up else params["generator"]
        return {"retriever": retriever, "generator": generator}

    return Assembly(
        parts.joint_task(stage),
        train,
        validation,
        frozen={"generator": judge},
        initial=initial,
        on_refresh=Refresh(parts, run, stage, train),
    )


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
            ids = self._search(params["retriever"])
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


def corpus_encoder_of(parts: Parts, retriever: Params) -> CorpusEncoder:
    return CorpusEncoder(
        model=parts.encoder.model,
        params=retriever["encoder"],
        tokenizer=parts.encoder.tokenizer,
        max_query_tokens=parts.settings.layout.max_query_tokens,
        max_key_tokens=parts.settings.layout.max_key_tokens,
        hash=hash_json([hash_tree(retriever["encoder"]), dataclasses.asdict(parts.settings.retriever)]),
    )


def corpus_encoder(run: RunContext, stage: str) -> CorpusEncoder:
    """The encoder that index stages embed with: of training stage `stage`, or as pretrained if that is empty."""
    parts = Parts.of(run)
    return corpus_encoder_of(parts, parts.retriever_params(run, stage))


def sketch_generator(stage: GeneratorStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    ids, mask = _shape(batch_size, length), _shape(batch_size, length, kind=bool)
    target = (batch_size, parts.settings.layout.max_target_tokens)
    batch = LabelledBatch(
        source=ids,
        source_mask=mask,
        target=_shape(*target),
        target_mask=_shape(*target, kind=bool),
        valid=_shape(batch_size, kind=bool),
        emotion=_shape(batch_size),
    )
    return Sketch(parts.generator_task(stage), batch)


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


def sketch_retriever(stage: RetrieverStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    return Sketch(parts.retriever_task(stage.distillation), _sketch_batch(parts, stage, batch_size, length))


def sketch_joint(stage: JointStage, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = Parts.of(run, planned=True)
    return Sketch(parts.joint_task(stage), _sketch_batch(parts, stage, batch_size, length))


def _shape(*sizes: int, kind: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(sizes, kind)


TASKS = {
    "generator": TaskSpec(GeneratorStage, build_generator, sketch_generator),
    "retriever": TaskSpec(RetrieverStage, build_retriever, sketch_retriever),
    "joint": TaskSpec(JointStage, build_joint, sketch_joint),
}
