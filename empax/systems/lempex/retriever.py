"""LEMPEx' retriever: DPR on dialogues. It finds responses of the training split that could answer a context.

Source: Majumder et al. 2022, Sec. 3.3 and 3.5.1, Eq. 3 and 11, Alg. 2 and 3; Karpukhin et al. 2020 (DPR).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.config import ConfigError, check_numbers
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Instance, Params
from empax.data.exemplars import Key, dialogue_groups, emotion_ids, encode_keys, encode_queries
from empax.data.store import check_prepared, load_instances, may_load, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.decoding.settings import LEAST_TEMPERATURE
from empax.interop.pretrained import check_fits, check_weights
from empax.interop.pretrained_encoders import LoadedEncoder, load_encoder
from empax.models.dual_encoder import Towers
from empax.parts.exemplars import checks
from empax.parts.exemplars.dense import DenseRetriever, check_dense
from empax.parts.exemplars.dense_retrieval import (
    GivenPair,
    Keys,
    Negative,
    RetrievalBatch,
    RetrievalExamples,
    find_given_pairs,
    load_given_pairs,
)
from empax.parts.exemplars.parts import RetrievalParts
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.trained import Trained, check_adapters
from empax.retrieval.encode import CorpusEncoder
from empax.training.checkpoint import load_params


@dataclasses.dataclass(frozen=True)
class TowerSettings(RetrievalSettings):
    """Settings shared by all stages that read exemplars of LEMPEx' retriever.

    Attributes:
      key: "response" alone is the paper's.
      towers: "separate" encoders of contexts and responses, as in DPR, or one "shared" encoder.
      key_pretrained: pretrained weights of the encoder of responses, if towers are separate; empty = those of the other
        encoder. For the two folders of a DPR model.
    """

    key: Key = "response"
    towers: Literal["separate", "shared"] = "separate"
    key_pretrained: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.emotion_share:
            raise ConfigError(f"emotion_share = {self.emotion_share} is REG's; this retriever has none, set it to 0.")
        if self.key_pretrained and (self.towers == "shared" or not self.retriever.pretrained):
            raise ConfigError(
                f"key_pretrained = {self.key_pretrained!r} is the second of two pretrained towers; set "
                "towers = 'separate' and retriever.pretrained, or leave it empty."
            )


@dataclasses.dataclass(frozen=True)
class RetrieverTaskSettings:
    """Training settings of the retriever (Alg. 2).

    Attributes:
      negatives: negatives of each context besides the other responses of its batch: a response from a dialogue of
        another emotion, and one from another dialogue of the same emotion. Both are Alg. 2; ("other_emotion",) is the
        text of Sec. 3.5.1; () = in-batch negatives alone.
      dpr_data: "ed" = the run's training split; "ed_reddit" adds the authors' Reddit pairs, with their negatives.
      temperature: divides the scores; 1 is the paper's, for unnormalized vectors.
    """

    negatives: tuple[Negative, ...] = ("other_emotion", "same_emotion")
    dpr_data: Literal["ed", "ed_reddit"] = "ed"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "temperature", least=LEAST_TEMPERATURE)
        if len(set(self.negatives)) < len(self.negatives):
            raise ConfigError(f"negatives = {self.negatives} must name each kind once.")


@dataclasses.dataclass(frozen=True)
class TowerParts:
    """The parts of the retriever's stages.

    Attributes:
      retrieval: has the encoder of contexts, whose tokenizer also reads responses.
      keys: the encoder of responses; None = one encoder reads both.
    """

    retrieval: RetrievalParts
    keys: LoadedEncoder | None

    @classmethod
    def of(cls, run: RunContext, *, with_params: bool = True, planned: bool = False) -> TowerParts:
        settings = run.shared_settings(TowerSettings)
        tokenizer = run_tokenizer(run, planned=planned)
        retrieval = RetrievalParts.of(run, tokenizer, with_params=with_params, planned=planned)
        if settings.towers == "shared":
            return cls(retrieval, None)
        if not settings.key_pretrained:
            return cls(retrieval, retrieval.encoder)
        chosen = dataclasses.replace(settings.retriever, pretrained=settings.key_pretrained)
        with_params = with_params and not planned
        return cls(retrieval, load_encoder(chosen, None, with_params=with_params, planned=planned))

    @property
    def towers(self) -> Towers:
        return Towers(self.retrieval.encoder.model, None if self.keys is None else self.keys.model)

    def initial(self) -> Params | None:
        """Returns the pretrained parameters of the towers; None if there are none."""
        found = (self.retrieval.encoder.params, (self.keys or self.retrieval.encoder).params)
        return None if found[0] is None else dict(zip(self.towers.names, found, strict=True))

    def corpus_encoder(self, params: Params) -> CorpusEncoder:
        return self.retrieval.corpus_encoder(self.towers, params, params)


def pretrained_towers(run: RunContext) -> CorpusEncoder:
    """Returns the untrained retriever, the paper's "pre-trained DPR"; without weights, random from the run's seed."""
    parts = TowerParts.of(run)
    params = parts.initial()
    if params is None:
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        params = jax.jit(parts.towers.init)(jax.random.key(run.seed), ids, mask)  # op by op it takes seconds
    return parts.corpus_encoder(params)


def trained_towers(run: RunContext, stage: str) -> CorpusEncoder:
    """Loads the retriever that the stage `stage` trained."""
    return TowerParts.of(run, with_params=False).corpus_encoder(load_params(run.files.stage(stage)))


def check_towers(run: RunContext) -> None:
    """Checks that the encoders exist and are compatible; see also `checks.check_retriever`.

    Raises:
      ConfigError: a model does not exist or cannot read texts of the lengths set, or the two models have vectors of
        different sizes or different vocabularies.
      DataError: files of a model are missing or broken.
    """
    checks.check_retriever(run)
    settings = run.shared_settings(TowerSettings)
    name, other = settings.retriever.pretrained, settings.key_pretrained
    if not other or not may_load(run, other) or not may_load(run, name):
        return
    check_weights(other)
    parts = TowerParts.of(run, with_params=False)
    first, second = parts.retrieval.encoder, cast(LoadedEncoder, parts.keys)
    where = f"{run.shared}.key_pretrained"
    if first.model.width != second.model.width:
        raise ConfigError(
            f"{where} = {other!r} makes vectors of {second.model.width}, {name} of {first.model.width}: they cannot be "
            "compared; name two encoders of one size."
        )
    mine, theirs = cast(SubwordTokenizer, first.tokenizer), cast(SubwordTokenizer, second.tokenizer)
    if not mine.extends(theirs):
        raise ConfigError(f"{where} = {other!r} reads other ids than {name}; name two encoders of one vocabulary.")
    checks.check_vectors(second, other, where=run.shared)
    check_fits(second.model, max_key_tokens=settings.layout.max_key_tokens)


def check_retriever(stage: RetrieverTaskSettings, run: RunContext) -> None:
    """Checks that the stage has its training data.

    Raises:
      ConfigError: contexts do not fit the buckets, a split names no emotion, or the Reddit pairs are missing.
    """
    check_prepared(run)
    check_dense(stage.negatives, run)
    if stage.dpr_data == "ed_reddit":
        for split in ("train", "validation"):
            load_given_pairs(find_given_pairs(run.plan.data.dir), split)


def retriever_task(parts: TowerParts, stage: RetrieverTaskSettings) -> DenseRetriever:
    return DenseRetriever(parts.towers, stage.temperature)


def build_retriever(stage: RetrieverTaskSettings, run: RunContext) -> Assembly:
    # Without weights: what this holds stays in memory beside the training state.
    parts = TowerParts.of(run, with_params=False)
    settings = parts.retrieval.settings
    initial = (lambda _: TowerParts.of(run).initial()) if settings.retriever.pretrained else None
    return Assembly(
        retriever_task(parts, stage),
        _examples(parts, stage, run, "train"),
        _examples(parts, stage, run, "validation"),
        initial=initial,
    )


def _examples(parts: TowerParts, stage: RetrieverTaskSettings, run: RunContext, split: str) -> RetrievalExamples:
    """Builds the examples of a split: its contexts with negatives of the split, and the Reddit pairs if set."""
    settings, tokenizer = parts.retrieval.settings, parts.retrieval.encoder.tokenizer
    layout = settings.layout
    as_queries = functools.partial(encode_queries, tokenizer, max_tokens=layout.max_query_tokens, query=settings.query)
    as_keys = functools.partial(encode_keys, tokenizer, max_tokens=layout.max_key_tokens, key=settings.key)
    instances = load_instances(run, split)
    queries, positives = as_queries(instances), np.arange(len(instances))
    keys = Keys(as_keys(instances), dialogue_groups(instances), emotion_ids(instances))
    given = np.full((len(instances), len(stage.negatives)), -1)
    if stage.dpr_data == "ed_reddit":
        pairs = load_given_pairs(find_given_pairs(run.plan.data.dir), split)
        answered = [pair.instance for pair in pairs]
        first = len(keys.ids)
        keys += Keys(as_keys(answered), dialogue_groups(answered), emotion_ids(answered))
        rows = np.full((len(pairs), len(stage.negatives)), -1)
        for column, kind in enumerate(stage.negatives):
            rows[:, column] = len(keys.ids) + np.arange(len(pairs))
            keys += _of_no_dialogue(as_keys, pairs, kind)
        queries = [*queries, *as_queries(answered)]
        positives = np.concatenate([positives, first + np.arange(len(pairs))])
        given = np.concatenate([given, rows])
    return RetrievalExamples(
        queries, positives, keys, stage.negatives,
        given=given, pad_id=tokenizer.pad_id, max_key_tokens=layout.max_key_tokens,
    )  # fmt: skip


def _of_no_dialogue(as_keys: functools.partial[list[list[int]]], pairs: Sequence[GivenPair], kind: Negative) -> Keys:
    """Returns the negatives that come with the pairs; the posts they answer are unknown."""
    ids = as_keys([Instance("", (), pair.negatives[kind], "") for pair in pairs])
    unknown = np.full(len(pairs), -1, np.int32)
    return Keys(ids, unknown, unknown)


def sketch_retriever(stage: RetrieverTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = TowerParts.of(run, planned=True)
    keys = parts.retrieval.settings.layout.max_key_tokens
    batch = shapes_of(RetrievalBatch, B=batch_size, S=length, K=1 + len(stage.negatives), P=keys)
    return Sketch(retriever_task(parts, stage), batch)


def trained_retriever(stage: RetrieverTaskSettings, run: RunContext, adapters: bool, *, side: int) -> Trained:
    """Returns the encoder of contexts (side 0) or of responses (side 1) of the current stage of `run`.

    Raises:
      ConfigError: `adapters` is set; a retriever has none.
      CheckpointError: the stage has not been trained.
    """
    params = load_params(run.directory)
    check_adapters(adapters, run, "retriever")
    parts, settings = TowerParts.of(run, with_params=False), run.shared_settings(TowerSettings)
    towers = parts.towers
    return Trained(
        run.stage,
        "retriever",
        (towers.key or towers.query) if side else towers.query,
        params[towers.names[side]],
        cast(SubwordTokenizer, parts.retrieval.encoder.tokenizer),
        settings.decoding,
        (settings.key_pretrained if side else "") or settings.retriever.pretrained,
        max_tokens=(settings.layout.max_query_tokens, settings.layout.max_key_tokens)[side],
    )


RETRIEVER = TaskSpec(
    RetrieverTaskSettings,
    check_retriever,
    build_retriever,
    sketch_retriever,
    encoder=trained_towers,
    models={
        "retriever": functools.partial(trained_retriever, side=0),
        "key_retriever": functools.partial(trained_retriever, side=1),
    },
    unread=("generator", "decoding", "form", "own_decoding", "lora", "attributes", "passages", "logits_at_once"),
)
"""Exports the encoder of contexts as the main model, and the encoder of responses as a second one."""
