"""LEMPEx' retriever: DPR on dialogues. It finds responses of the training split that could answer a context.

Source: Majumder et al. 2022, Sec. 3.3 and 3.5.1, Eq. 3 and 11, Alg. 2 and 3; Karpukhin et al. 2020 (DPR).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax

from empax.core.config import ConfigError
from empax.core.system import Assembly, RunContext, Sketch, TaskSpec
from empax.core.types import Params
from empax.data.store import load_instances, may_load, run_tokenizer
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.pretrained import check_fits, check_weights
from empax.interop.pretrained_encoders import LoadedEncoder, load_encoder
from empax.models.dual_encoder import Towers, random_params
from empax.parts.exemplars import checks, dense
from empax.parts.exemplars.dense_retrieval import GivenPair, find_given_pairs, load_given_pairs
from empax.parts.exemplars.parts import RetrievalParts
from empax.parts.exemplars.settings import INDEX_UNREAD
from empax.parts.generator.trained import Trained, check_adapters
from empax.retrieval.encode import CorpusEncoder
from empax.systems.lempex.settings import LempexSettings, RetrieverTaskSettings
from empax.training.checkpoint import load_params

UNREAD = (*INDEX_UNREAD, "speakers")
"""Shared settings that neither the retriever nor an index reads."""


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
        settings = run.shared_settings(LempexSettings)
        tokenizer = run_tokenizer(run, planned=planned)
        retrieval = RetrievalParts.of(run, tokenizer, with_params=with_params, planned=planned)
        keys = None if settings.towers == "shared" else retrieval.encoder
        if settings.key_pretrained:
            keys = _key_encoder(settings, with_params=with_params and not planned, planned=planned)
        return cls(retrieval, keys)

    @property
    def towers(self) -> Towers:
        return Towers(self.retrieval.encoder.model, None if self.keys is None else self.keys.model)

    def initial(self) -> Params | None:
        """Returns the pretrained parameters of the towers; None if there are none."""
        found = (self.retrieval.encoder.params, (self.keys or self.retrieval.encoder).params)
        return None if found[0] is None else dict(zip(self.towers.names, found, strict=True))

    def corpus_encoder(self, params: Params) -> CorpusEncoder:
        return self.retrieval.corpus_encoder(self.towers, params, params)


def _key_encoder(settings: LempexSettings, *, with_params: bool, planned: bool = False) -> LoadedEncoder:
    """Loads the encoder that `key_pretrained` names, which needs nothing from the run."""
    chosen = dataclasses.replace(settings.retriever, pretrained=settings.key_pretrained)
    return load_encoder(chosen, None, with_params=with_params, planned=planned)


def pretrained_towers(run: RunContext) -> CorpusEncoder:
    """Returns the untrained retriever, the paper's "pre-trained DPR"; without weights, random from the run's seed."""
    parts = TowerParts.of(run)
    return parts.corpus_encoder(parts.initial() or random_params(parts.towers.init, jax.random.key(run.seed)))


def trained_towers(run: RunContext, stage: str) -> CorpusEncoder:
    """Loads the retriever that the stage `stage` trained."""
    return TowerParts.of(run, with_params=False).corpus_encoder(load_params(run.files.stage(stage)))


def check_towers(run: RunContext) -> None:
    """Checks as `checks.check_retriever` does; raises ConfigError, too, if the two encoders are not compatible."""
    first = checks.check_retriever(run)
    settings = run.shared_settings(LempexSettings)
    name, other, where = settings.retriever.pretrained, settings.key_pretrained, f"{run.shared}.key_pretrained"
    if first is None or not other or not may_load(run, other):
        return
    check_weights(other)
    second = _key_encoder(settings, with_params=False)
    if first.model.width != second.model.width:
        raise ConfigError(
            f"{where} = {other!r} makes vectors of {second.model.width}, {name} of {first.model.width}: they cannot be "
            "compared; name two encoders of the same size."
        )
    if not cast(SubwordTokenizer, first.tokenizer).extends(cast(SubwordTokenizer, second.tokenizer)):
        raise ConfigError(f"{where} = {other!r} reads other ids than {name}; name two encoders with one vocabulary.")
    checks.check_vectors(second, other, where=run.shared)
    check_fits(second.model, max_key_tokens=settings.layout.max_key_tokens)


def check_retriever(stage: RetrieverTaskSettings, run: RunContext) -> None:
    """Checks as `dense.check_dense` does, and that the Reddit pairs exist if the stage reads them."""
    dense.check_dense(stage.negatives, run)
    for split in ("train", "validation"):
        _given_pairs(stage, run, split)


def build_retriever(stage: RetrieverTaskSettings, run: RunContext) -> Assembly:
    # Without weights: what this holds stays in memory beside the training state.
    parts = TowerParts.of(run, with_params=False)
    initial = (lambda _: TowerParts.of(run).initial()) if parts.retrieval.settings.retriever.pretrained else None
    examples = (
        dense.dense_examples(parts.retrieval, stage, load_instances(run, split), _given_pairs(stage, run, split))
        for split in ("train", "validation")
    )
    return Assembly(dense.DenseRetriever(parts.towers, stage.temperature), *examples, initial=initial)


def _given_pairs(stage: RetrieverTaskSettings, run: RunContext, split: str) -> list[GivenPair]:
    """Loads the Reddit pairs of a split if the stage reads them."""
    return load_given_pairs(find_given_pairs(run.plan.data.dir), split) if stage.dpr_data == "ed_reddit" else []


def sketch_retriever(stage: RetrieverTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    parts = TowerParts.of(run, planned=True)
    batch = dense.sketch_batch(parts.retrieval, stage, batch_size, length)
    return Sketch(dense.DenseRetriever(parts.towers, stage.temperature), batch)


def trained_retriever(stage: RetrieverTaskSettings, run: RunContext, adapters: bool, *, side: int) -> Trained:
    """Returns the encoder of contexts (side 0) or of responses (side 1) of the trained stage of `run`.

    `adapters` are refused, since it has none.
    """
    params = load_params(run.directory)
    check_adapters(adapters, run, "retriever")
    parts, settings = TowerParts.of(run, with_params=False), run.shared_settings(LempexSettings)
    towers, most = parts.towers, (settings.layout.max_query_tokens, settings.layout.max_key_tokens)[side]
    model = (towers.key or towers.query) if side else towers.query
    began = settings.key_pretrained if side else ""
    return parts.retrieval.to_export(run.stage, model, params[towers.names[side]], most, pretrained=began)


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
    unread=UNREAD,
)
"""Exports the encoder of contexts as the main model, and the encoder of responses as a second one."""
