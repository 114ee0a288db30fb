"""Retrieval: the pretrained encoder, examples with exemplars, and the search for an answer's exemplars."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias, cast

import jax
import numpy as np

from empax.core.files import hash_json
from empax.core.protocols import Tokenizer
from empax.core.sharding import local_mesh
from empax.core.system import RunContext, load_encoder_of
from empax.core.tree import hash_tree
from empax.core.types import Instance, Params
from empax.data.batches import draw_rows
from empax.data.exemplars import Corpus, ExemplarExamples, encode_keys, encode_queries, traits
from empax.data.sources import SourceForm
from empax.data.store import load_candidates, load_instances, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.pretrained_encoders import LoadedEncoder, load_encoder
from empax.models.dual_encoder import DualEncoder, Towers, random_params
from empax.parts.exemplars.settings import RetrievalSettings
from empax.parts.generator.answerer import AnswerExamples
from empax.parts.generator.parts import GeneratorParts
from empax.parts.generator.trained import Trained
from empax.retrieval.encode import BUCKETS, CorpusEncoder, Embedder
from empax.retrieval.filters import ExemplarFilter, find_exemplars, load_filter
from empax.retrieval.index import Index, load_index

TextOf: TypeAlias = Callable[[Sequence[Instance]], list[list[int]]]


@dataclasses.dataclass(frozen=True)
class RetrievalParts:
    """The parts of a retrieving system's stages besides the generator."""

    settings: RetrievalSettings
    encoder: LoadedEncoder

    @classmethod
    def of(
        cls, run: RunContext, tokenizer: Tokenizer, *, with_params: bool = True, planned: bool = False
    ) -> RetrievalParts:
        """Returns the parts of `run`; an encoder from scratch uses `tokenizer`, the generator's."""
        settings = run.shared_settings(RetrievalSettings)
        with_params = with_params and not planned
        encoder = load_encoder(settings.retriever, tokenizer, with_params=with_params, planned=planned)
        return cls(settings, encoder)

    def without_params(self) -> RetrievalParts:
        return dataclasses.replace(self, encoder=dataclasses.replace(self.encoder, params=None))

    @property
    def query_text(self) -> TextOf:
        """Encodes contexts for the retriever; it holds no weights."""
        most, query = self.settings.layout.max_query_tokens, self.settings.query
        return functools.partial(encode_queries, self.encoder.tokenizer, max_tokens=most, query=query)

    @property
    def key_text(self) -> TextOf:
        """Encodes exemplars for the retriever; it holds no weights."""
        most, key = self.settings.layout.max_key_tokens, self.settings.key
        return functools.partial(encode_keys, self.encoder.tokenizer, max_tokens=most, key=key)

    def corpus(self, instances: Sequence[Instance], form: SourceForm) -> Corpus:
        return Corpus.of(instances, form, self.encoder.tokenizer, self.settings.key)

    def examples(
        self, instances: Sequence[Instance], corpus: Corpus, candidates: np.ndarray, form: SourceForm, **options: Any
    ) -> ExemplarExamples:
        tokenizer, query = self.encoder.tokenizer, self.settings.query
        return ExemplarExamples(instances, corpus, candidates, form, tokenizer, query=query, **options)

    def searched(
        self, run: RunContext, index: str, split: str, corpus: Corpus, form: SourceForm, limit: int, **options: Any
    ) -> ExemplarExamples:
        """Builds examples of the instances of a split that have candidates, at most `limit` (0 = all)."""
        instances, ids = searched_instances(run, index, split, limit)
        return self.examples(instances, corpus, ids, form, **options)

    def corpus_encoder(self, model: Embedder, params: Params, made_by: Params, *more: Any) -> CorpusEncoder:
        """Builds an encoder of instances; its hash covers `made_by`, the part of `params` in use, and `more`."""
        # Without the settings of planning and training, which change no vector.
        without = {"preset", "attention", "remat", "unroll", "dropout"}
        fields = dataclasses.asdict(self.settings.retriever)
        settings = {name: value for name, value in fields.items() if name not in without}
        return CorpusEncoder(
            model=model,
            params=params,
            pad_id=self.encoder.tokenizer.pad_id,
            query_text=self.query_text,
            key_text=self.key_text,
            hash=hash_json([hash_tree(made_by), settings, self.settings.key, self.settings.query, *more]),
        )

    def to_export(
        self, stage: str, model: DualEncoder, params: Params, max_tokens: int, *, pretrained: str = ""
    ) -> Trained:
        """Returns an encoder that `stage` trained; it began as `pretrained`, empty = as the settings say."""
        tokenizer, settings = cast(SubwordTokenizer, self.encoder.tokenizer), self.settings
        base = pretrained or settings.retriever.pretrained
        return Trained(stage, "retriever", model, params, tokenizer, settings.decoding, base, max_tokens=max_tokens)


def searched_instances(run: RunContext, index: str, split: str, limit: int) -> tuple[list[Instance], np.ndarray]:
    """Loads the instances of a split that have candidates, at most `limit` (0 = all), and these candidates, [N, M]."""
    positions, ids = load_candidates(run, index, split)
    rows = draw_rows(len(positions), limit)
    instances = load_instances(run, split)
    return [instances[p] for p in positions[rows]], ids[rows]


def pretrained_encoder(run: RunContext) -> CorpusEncoder:
    """Returns the pretrained encoder, or a random one from the run's seed."""
    parts = RetrievalParts.of(run, run_tokenizer(run))
    model, params = Towers(parts.encoder.model), parts.encoder.params
    if params is None:
        rng = jax.random.split(jax.random.key(run.seed), 3)[0]  # as a retriever that learns emotions is initialized
        params = random_params(model.query.init, rng)["params"]
    return parts.corpus_encoder(model, {"encoder": params}, params)


@dataclasses.dataclass(frozen=True)
class ExemplarSearch:
    """Finds the exemplars for an answer, and builds the examples that show them.

    Attributes:
      parts: parts of the generator that reads them.
      retrieval: parts of the retriever.
      encoder: encoder of the queries.
      index: index whose vectors are comparable with the queries.
      corpus: the indexed pairs.
      filter: filter of the results (`retrieval.filters.load_filter`); None = no filter.
      buckets: lengths of sources; empty = the longest alone.
    """

    parts: GeneratorParts
    retrieval: RetrievalParts
    encoder: CorpusEncoder
    index: Index
    corpus: Corpus
    filter: ExemplarFilter | None = None
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        run: RunContext,
        parts: GeneratorParts,
        index: str,
        *,
        buckets: Sequence[int],
        encoder: Any = None,
        made_by: str = "",
        corpus: Corpus | None = None,
    ) -> Self:
        """Loads the finished stage `index`, with its filter; without `buckets`, for single queries by one program.

        `encoder` embeds the queries (None = the encoder that built the index), `made_by` is the hash of the encoder
        that must have built the index (empty = of `encoder`), `corpus` the indexed pairs (None = as for the generator).

        Raises:
          StaleIndexError: another encoder built the index.
        """
        retrieval = RetrievalParts.of(run, parts.tokenizer, with_params=False)
        encoder = encoder or load_encoder_of(run, run.named(index).settings.encoder)
        found = load_index(run.files.index(index), encoder_hash=made_by or encoder.hash, mesh=local_mesh())
        encoder = dataclasses.replace(
            encoder, buckets=BUCKETS if buckets else (retrieval.settings.layout.max_query_tokens,)
        )
        corpus = corpus or Corpus.of(load_instances(run, "train"), parts.form())  # keys are read in training alone
        return cls(parts, retrieval, encoder, found, corpus, load_filter(run.files.stage(index)), tuple(buckets))

    @property
    def pairs(self) -> Sequence[Instance]:
        return self.corpus.instances

    def __call__(self, instances: Sequence[Instance]) -> AnswerExamples:
        return self.show(instances, *self.find(instances))

    def find(self, instances: Sequence[Instance]) -> tuple[np.ndarray, np.ndarray]:
        """Finds as many rows as an answer reads, and their scores; see `search`."""
        return self.search(instances, self.parts.settings.passages)

    def show(self, instances: Sequence[Instance], rows: np.ndarray, scores: np.ndarray) -> AnswerExamples:
        """Shows the instances with these rows of the corpus, [N, K], -1 = none; they need not come from a search."""
        settings = self.parts.settings
        examples = self.retrieval.examples(
            instances,
            self.corpus,
            rows,
            self.parts.for_answers(self.buckets, passages=rows.shape[1]).form(),
            # The embeddings replace the keys.
            key_embeddings=self.index.embeddings,
            response_tokens=settings.decoding.max_tokens if settings.reads_responses else 0,
        )
        return AnswerExamples(examples, self.notes(rows, scores))

    def notes(self, rows: np.ndarray, scores: np.ndarray) -> list[Mapping[str, Any]]:
        """Returns the notes on exemplars in each instance's prediction."""
        return [{"exemplars": self.told(*pair)} for pair in zip(rows, scores, strict=True)]

    def search(self, instances: Sequence[Instance], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of the corpus and scores, [N, k]; never from an instance's own dialogue."""
        queries = self.encoder.embed_queries(instances, mesh=local_mesh())
        found = find_exemplars(self.index, queries, k, **traits(instances), filter=self.filter)
        return np.asarray(found.ids), np.asarray(found.scores)

    def told(self, rows: np.ndarray, scores: np.ndarray) -> tuple[Mapping[str, Any], ...]:
        """Returns a prediction's description of its exemplars, rows of the corpus with their scores; -1 = none."""
        instances = self.corpus.instances
        found = [(instances[int(row)], float(score)) for row, score in zip(rows, scores, strict=True) if row >= 0]
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
