"""What answers once it is trained: retrieves exemplars where it has an index, reads them with the context, decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm

from empax.core.memory import give_back_freed_memory
from empax.core.sharding import batch_sharding, local_mesh, place_rows, rows_split_as
from empax.core.types import EMOTIONS, Instance, Params, Prediction
from empax.data.batches import eval_batches
from empax.data.exemplars import ContextExamples, Corpus, dialogue_groups
from empax.decoding.passages import PassageReader
from empax.models.fusion_in_decoder import FusionInDecoder
from empax.retrieval.corpus import CorpusEncoder
from empax.retrieval.index import Index
from empax.systems.dialogue.parts import Parts, places


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """What finds exemplars: the query encoder, the index that it may be compared with, and the indexed pairs."""

    encoder: CorpusEncoder
    index: Index
    corpus: Corpus

    def search(self, instances: Sequence[Instance], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the corpus and scores, [N, k]; never of an instance's own dialogue."""
        queries = self.encoder.embed_queries(instances, mesh=local_mesh())
        found = self.index.search(queries, k, query_groups=dialogue_groups(instances))
        return np.asarray(found.ids), np.asarray(found.scores)


MAX_REFERENCE_TOKENS = 512
_BATCHES_OF_FREED_MEMORY = 8


class Responder:
    """Answers instances. Gold responses are scored where they are given, and reach no input.

    `task` has `generate`, `judge` and `heads` (see `Generator`); one that has `read_before` too has its passages read
    without padding, on a single device, where `many_shapes` may be compiled.
    """

    def __init__(
        self,
        parts: Parts,
        task: Any,
        params: Params,
        retrieval: Retrieval | None,
        buckets: Sequence[int],
        *,
        many_shapes: bool = True,
    ):
        # No reference is cut: what is scored is the likelihood of all of its words.
        layout = dataclasses.replace(parts.settings.layout, max_target_tokens=MAX_REFERENCE_TOKENS)
        self.parts = dataclasses.replace(parts, settings=dataclasses.replace(parts.settings, layout=layout))
        self.task, self.retrieval, self.buckets = task, retrieval, tuple(buckets)
        self._mesh = local_mesh(parts.mesh)
        fuses = hasattr(task, "read_before") and isinstance(task.model, FusionInDecoder)
        self._reader = PassageReader(task.model) if fuses and many_shapes and self._mesh is None else None
        self.take(params)
        rows = batch_sharding(self._mesh) if self._mesh else None

        def answer(params: Params, batch: Any, rng: jax.Array) -> tuple[Any, Any]:
            with rows_split_as(rows):
                return task.generate(params, {}, batch, rng).tokens[:, 0], task.judge(params, batch)

        def judge(params: Params, batch: Any) -> Any:
            with rows_split_as(rows):
                return task.judge(params, batch)

        self._answer, self._judge = jax.jit(answer), jax.jit(judge)

    def _placed(self, batch: Any) -> Any:
        """On the devices, with its passages read where they can be read without padding."""
        if self._reader is not None:
            batch = self.task.read_before(self._reader, self._params, batch)
        return place_rows(batch, self._mesh)

    def take(self, params: Params) -> None:
        """Answers with `params` from now on: they are put once, not with every batch, onto this process's devices."""
        mesh = self._mesh
        self._params = jax.device_put(params, places(params, mesh, self.parts.mesh) if mesh else None)

    @property
    def heads(self) -> tuple[str, ...]:
        """The emotion heads that this run has."""
        return self.task.heads

    def for_single_texts(self) -> Responder:
        """The same, padding every query to one length: for answering one context at a time."""
        if self.retrieval is None:
            return self
        encoder = self.retrieval.encoder
        encoder = dataclasses.replace(encoder, buckets=(encoder.max_query_tokens,))
        retrieval = dataclasses.replace(self.retrieval, encoder=encoder)
        return Responder(self.parts, self.task, self._params, retrieval, self.buckets, many_shapes=False)

    def respond(
        self, instances: Sequence[Instance], *, batch_size: int, seed: int, progress: str | None = None
    ) -> list[Prediction]:
        """One prediction per instance, in order; `notes` hold `nll`, `num_tokens` and each head's emotion."""
        examples, rows, scores = self._examples(instances)
        made: dict[int, Prediction] = {}
        rng = jax.random.key(seed)
        shown = None if progress else True  # None: on a terminal only
        with tqdm.tqdm(total=len(instances), desc=progress, disable=shown, unit="ex") as bar:
            for number, (indices, batch) in enumerate(self._batches(examples, batch_size)):
                tokens, judged = jax.device_get(
                    self._answer(self._params, self._placed(batch), jax.random.fold_in(rng, number))
                )
                for b, i in enumerate(int(i) for i in indices):
                    if i < 0:
                        continue
                    exemplars = () if rows is None or scores is None else self._exemplars(rows[i], scores[i])
                    notes = {name: values[b] for name, values in judged.items()}
                    made[i] = self._prediction(instances[i], tokens[b], notes, exemplars)
                bar.update(int((indices >= 0).sum()))
        return [made[i] for i in range(len(instances))]

    def emotions(self, instances: Sequence[Instance], *, batch_size: int) -> list[dict[str, str]]:
        """What each head reads from each instance, in order; nothing is decoded."""
        if not self.heads:
            return [{} for _ in instances]
        examples, _, _ = self._examples(instances)
        made: dict[int, dict[str, str]] = {}
        for indices, batch in self._batches(examples, batch_size):
            judged = jax.device_get(self._judge(self._params, self._placed(batch)))
            for b in np.flatnonzero(indices >= 0):
                made[int(indices[b])] = {head: EMOTIONS[int(judged[head][b])] for head in self.heads}
        return [made[i] for i in range(len(instances))]

    def _batches(self, examples: ContextExamples, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
        """`eval_batches`; now and then the memory that batches of other shapes have left is given back."""
        for number, batch in enumerate(eval_batches(examples, batch_size=batch_size, buckets=self.buckets), 1):
            yield batch
            if number % _BATCHES_OF_FREED_MEMORY == 0:
                give_back_freed_memory()

    def _examples(self, instances: Sequence[Instance]) -> tuple[ContextExamples, np.ndarray | None, np.ndarray | None]:
        parts, settings = self.parts, self.parts.settings
        if self.retrieval is None:
            return ContextExamples(instances, parts.form(exemplars=False)), None, None
        rows, scores = self.retrieval.search(instances, settings.passages)
        # The embeddings stand in for the keys, which nobody reads when nothing is trained.
        embeddings = self.retrieval.index.embeddings
        examples = parts.exemplar_examples(
            instances,
            self.retrieval.corpus,
            rows,
            key_embeddings=embeddings,
            response_tokens=settings.decoding.max_tokens if settings.decoding.rerank_exemplars else 0,
        )
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
            emotion_prediction=judged[self.heads[0]] if self.heads else "",
            attributes=dict(instance.notes.get("context_attributes", {})),
            exemplars=exemplars,
            notes={
                "nll": round(float(notes["nll"]), 5),
                "num_tokens": int(notes["num_tokens"]),
                "emotion_by_head": judged,
            },
        )
