"""The parts of REG's stages: the generator, the retriever, and the retriever's emotion head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from empax.core.system import RunContext
from empax.core.types import Instance, Params
from empax.data.exemplars import emotion_ids
from empax.data.store import run_tokenizer
from empax.models.heads import EMOTION_HEAD
from empax.parts.exemplars.parts import RetrievalParts
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.trained import Trained, check_adapters
from empax.retrieval.encode import CorpusEncoder
from empax.systems.reg.encoder import EmotionEncoder
from empax.systems.reg.settings import DenseTaskSettings, JointTaskSettings, RetrieverTaskSettings
from empax.training.checkpoint import load_params
from empax.training.lora import trained_whole


@dataclasses.dataclass(frozen=True)
class EmotionParts:
    """The parts of the retriever."""

    retrieval: RetrievalParts

    @property
    def retriever(self) -> EmotionEncoder:
        """The model that embeds contexts and exemplars, with its emotion head."""
        return EmotionEncoder(self.retrieval.encoder.model, EMOTION_HEAD, self.retrieval.settings.emotion_share)

    def retriever_params(self, run: RunContext, stage: str) -> Params:
        """Returns the retriever of a training stage; parts it did not train are pretrained, or random from the seed.

        With an empty `stage`, no part is trained.
        """
        trained: Params = {}
        if stage:
            trained = trained_whole(load_params(run.files.stage(stage)))
            trained = trained.get("retriever", trained)  # of a joint stage, its retriever
            if "encoder" in trained:
                return trained
        rng = jax.random.key(run.seed)
        ids, mask = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)
        known = self.retrieval.encoder.params

        # Compiled as one function: op by op it takes seconds. Known parameters are not drawn.
        @jax.jit
        def init(rng: jax.Array) -> Params:
            drawn = self.retriever.init(rng, ids, mask)
            return {name: None if known and name.endswith("encoder") else leaf for name, leaf in drawn.items()}

        fresh = {name: known if leaf is None else leaf for name, leaf in init(rng).items()}
        return fresh | trained

    def corpus_encoder(self, params: Params) -> CorpusEncoder:
        """Returns the encoder with a retriever's parameters."""
        model = self.retriever
        if not model.share:  # no parameter of the emotions reaches a vector
            return self.retrieval.corpus_encoder(model, params, params["encoder"])
        made = self.retrieval.corpus_encoder(model, params, params, model.share)
        return dataclasses.replace(made, complete_keys=functools.partial(with_emotions, model))


def with_emotions(
    model: EmotionEncoder, vectors: Float[np.ndarray, "N D"], instances: Sequence[Instance]
) -> Float[np.ndarray, "N E"]:
    """Returns the vectors of exemplars with their emotions concatenated."""
    return np.asarray(model.keys(jnp.asarray(vectors), jnp.asarray(emotion_ids(instances))))


@dataclasses.dataclass(frozen=True)
class RegParts(EmotionParts):
    """The parts of the retriever and of the generator."""

    generator: GeneratorParts

    @classmethod
    def of(cls, run: RunContext, *, with_params: bool = True, planned: bool = False) -> RegParts:
        """Returns the parts of `run`; `with_params` loads pretrained weights, the generator's only beneath adapters."""
        adapted = run.shared_settings(RetrievalSettings).lora is not None
        generator = GeneratorParts.of(run, with_params=with_params and adapted, planned=planned)
        retrieval = RetrievalParts.of(run, generator.tokenizer, with_params=with_params, planned=planned)
        return cls(retrieval, generator)


def emotion_parts(run: RunContext, *, with_params: bool = True) -> EmotionParts:
    """Returns the retriever's parts of `run`, without building a generator."""
    return EmotionParts(RetrievalParts.of(run, run_tokenizer(run), with_params=with_params))


def trained_encoder(run: RunContext, stage: str) -> CorpusEncoder:
    """Returns the encoder of the training stage `stage`, with which index stages embed."""
    parts = emotion_parts(run)
    return parts.corpus_encoder(parts.retriever_params(run, stage))


def trained_retriever(
    stage: DenseTaskSettings | RetrieverTaskSettings | JointTaskSettings, run: RunContext, adapters: bool
) -> Trained:
    """Returns the retriever of the trained stage of `run`, without its emotion head. `adapters` are refused."""
    params = trained_whole(load_params(run.directory))
    check_adapters(adapters, run, "retriever")
    parts = emotion_parts(run, with_params=False).retrieval
    most = max(parts.settings.layout.max_query_tokens, parts.settings.layout.max_key_tokens)
    return parts.to_export(run.stage, parts.encoder.model, params.get("retriever", params)["encoder"], most)
