"""A trained REG that answers: retrieves exemplars, reads them with the context, decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from empax.core.config import ConfigError, to_settings
from empax.core.run import RunContext
from empax.core.types import EMOTIONS, Instance, Params, Prediction
from empax.data.batches import eval_batches
from empax.data.exemplars import ContextExamples, Corpus, dialogue_groups
from empax.data.store import load_instances
from empax.retrieval.corpus import CorpusEncoder
from empax.retrieval.index import Index, load_index
from empax.systems.reg.parts import Parts, corpus_encoder_of
from empax.systems.reg.settings import GeneratorStage, JointStage
from empax.systems.reg.stages import corpus_encoder
from empax.systems.reg.tasks import Generator, Joint


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """What finds exemplars: the query encoder, the index that it may be compared with, and the indexed pairs."""

    encoder: CorpusEncoder
    index: Index
    corpus: Corpus

    def search(self, instances: Sequence[Instance], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the corpus and scores, [N, k]; never of an instance's own dialogue."""
        found = self.index.search(self.encoder.embed_queries(instances), k, query_groups=dialogue_groups(instances))
        return np.asarray(found.ids), np.asarray(found.scores)


MAX_REFERENCE_TOKENS = 512


class Responder:
    """Answers instances. Gold responses are scored where they are given, and reach no input."""

    def __init__(
        self, parts: Parts, task: Generator | Joint, params: Params, retrieval: Retrieval | None, buckets: Sequence[int]
    ):
        # No reference is cut: what is scored is the likelihood of all of its words.
        layout = dataclasses.replace(parts.settings.layout, max_target_tokens=MAX_REFERENCE_TOKENS)
        self.parts = dataclasses.replace(parts, settings=dataclasses.replace(parts.settings, layout=layout))
        self.task, self.params = task, params
        self.retrieval, self.buckets = retrieval, tuple(buckets)
        self._answer = jax.jit(
            lambda params, batch, rng: (
                task.generate(params, {}, batch, rng).tokens[:, 0],
                task.judge(params, batch),
            )
        )

    @property
    def heads(self) -> tuple[str, ...]:
        """The emotion heads that this run has."""
        return ("generator", "retriever", "both") if isinstance(self.task, Joint) else ("generator",)

    def for_single_texts(self) -> Responder:
        """The same, padding every query to one length: for answering one context at a time."""
        if self.retrieval is None:
            return self
        encoder = self.retrieval.encoder
        encoder = dataclasses.replace(encoder, buckets=(encoder.max_query_tokens,))
        return Responder(
            self.parts, self.task, self.params, dataclasses.replace(self.retrieval, encoder=encoder), self.buckets
        )

    def respond(
        self, instances: Sequence[Instance], *, batch_size: int, seed: int, progress: str | None = None
    ) -> list[Prediction]:
        """One prediction per instance, in order; `notes` hold `nll`, `num_tokens` and each head's emotion."""
        examples, rows, scores = self._examples(instances)
        made: dict[int, Prediction] = {}
        rng = jax.random.key(seed)
        shown = None if progress else True  # None: on a terminal only
        with tqdm.tqdm(total=len(instances), desc=progress, disable=shown, unit="ex") as bar:
            batches = eval_batches(examples, batch_size=batch_size, buckets=self.buckets)
            for number, (indices, batch) in enumerate(batches):
                tokens, judged = jax.device_get(self._answer(self.params, batch, jax.random.fold_in(rng, number)))
                for b, i in enumerate(int(i) for i in indices):
                    if i < 0:
                        continue
                    exemplars = () if rows is None or scores is None else self._exemplars(rows[i], scores[i])
                    notes = {name: values[b] for name, values in judged.items()}
                    made[i] = self._prediction(instances[i], tokens[b], notes, exemplars)
                bar.update(int((indices >= 0).sum()))
        return [made[i] for i in range(len(instances))]

    def _examples(self, instances: Sequence[Instance]) -> tuple[ContextExamples, np.ndarray | None, np.ndarray | None]:
        parts, settings = self.parts, self.parts.settings
        if self.retrieval is None:
            return ContextExamples(instances, parts.form(exemplars=False)), None, None
        rows, scores = self.retrieval.search(instances, settings.passages)
        # The embeddings stand in for the keys, which nobody reads when nothing is trained.
        embeddings = self.retrieval.index.embeddings
        examples = parts.exemplar_examples(instances, self.retrieval.corpus, rows, key_embeddings=embeddings)
        return examples, rows, scores

    def _exemplars(self, rows: np.ndarray, scores: np.ndarray) -> tuple[Mapping[str, Any], ...]:
        corpus = self.retrieval.corpus.instances if self.retrieval else ()
        found = [(corpus[int(row)], float(score)) for row, score in zip(rows, scores, strict=True) if row >= 0]
        return tuple(
            {
                "id": instance.id,
                "context": list(instance.context),
                "response": instance.response,
                "emotion": instance.emotion,
                "attributes": dict(instance.notes.get("response_attributes", {})),
                "score": round(score, 4),
            }
            for instance, score in found
        )

    def _prediction(
        self,
        instance: Instance,
        tokens: np.ndarray,
        notes: Mapping[str, np.ndarray],
        exemplars: tuple[Mapping[str, Any], ...],
    ) -> Prediction:
        judged = {name: EMOTIONS[int(notes[name])] for name in self.heads}
        return Prediction(
            context=instance.context,
            response=self.parts.tokenizer.decode([int(t) for t in tokens]),
            reference=instance.response,
            id=instance.id,
            emotion=instance.emotion,
            emotion_prediction=judged[self.heads[0]],
            attributes=dict(instance.notes.get("context_attributes", {})),
            exemplars=exemplars,
            notes={
                "nll": round(float(notes["nll"]), 5),
                "num_tokens": int(notes["num_tokens"]),
                "emotion_by_head": judged,
            },
        )


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
        return Responder(parts, task, params, None, buckets)
    if kind != "joint":
        raise ConfigError(
            f"config.{run.stage}.stage = {stage!r} trains {kind!r}; it must train 'joint' or 'generator'."
        )
    fields = {k: v for k, v in section.items() if k in JointStage.__dataclass_fields__}
    settings = to_settings(JointStage, fields, where=f"config.{stage}")
    retrieval = Retrieval(
        corpus_encoder_of(parts, params["retriever"]),
        load_index(run.files.index(index), encoder_hash=_maker_of_index(run, parts, settings, stage, params)),
        parts.corpus(load_instances(run, "train")),
    )
    return Responder(parts, parts.joint_task(settings), params, retrieval, buckets)


def _maker_of_index(run: RunContext, parts: Parts, settings: JointStage, stage: str, params: Params) -> str:
    """Hash of the encoder whose passages the trained queries belong to."""
    if settings.passage_encoder == "trained":
        return corpus_encoder_of(parts, params["retriever"]).hash
    # Query-side training: the passages stay those of the retriever that joint training began with.
    if settings.retriever:
        return corpus_encoder_of(parts, parts.retriever_params(run, settings.retriever)).hash
    return corpus_encoder(run, "").hash
