"""Task "reasons": the annotator of reasons (ERA), trained on spans that people or a lexicon have marked."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError
from empax.core.files import write_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Instance, Mean, Metrics, Params
from empax.data import features, spans
from empax.data.batches import draw
from empax.data.spans import Span, SpanExample
from empax.data.store import check_prepared, load_instances
from empax.data.tokenizers import SubwordTokenizer
from empax.interop.pretrained_encoders import EncoderSettings, LoadedEncoder
from empax.models.layers import apply
from empax.parts.encoder.stages import check_encoder, load_stage_encoder
from empax.systems.reflectdiffu.examples import ReasonBatch, ReasonExamples, pieces_of
from empax.systems.reflectdiffu.reason_annotator import ReasonAnnotator
from empax.systems.reflectdiffu.settings import ReasonTaskSettings, ReflectSettings
from empax.training.checkpoint import load_params

log = logging.getLogger("empax")

_ROWS = 64  # of a batch when contexts are annotated
_COUNTS = ("true", "predicted", "gold")


@dataclasses.dataclass(frozen=True)
class Reasons:
    """Negative log-likelihood of the tags of the speaker's pieces; F1 of pieces and of whole spans."""

    annotator: ReasonAnnotator

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return self.annotator.init(rng, batch.source, batch.source_mask)["params"]

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        told = batch.told & batch.source_mask & batch.valid[:, None]
        read = batch.source, batch.source_mask
        _, emissions = apply(self.annotator, params, *read, rng=rng if train else None)
        bound = {"params": params}
        scores: Any = self.annotator.apply(bound, emissions, batch.tags, told, method="log_likelihood")
        loss = Mean.of(-scores, batch.valid)
        if train:
            return loss, {}
        found: Any = self.annotator.apply(bound, emissions, told, method="tags")
        gold = jnp.where(told, batch.tags, 0)
        counts = {"token": _token_counts(gold, found), "span": _span_counts(gold, found)}
        metrics = {
            f"{kind}_{name}": Mean.of(values, batch.valid)
            for kind, three in counts.items()
            for name, values in zip(_COUNTS, three, strict=True)
        }
        return loss, metrics

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """`token_f1` and `span_f1`, shares, in place of the counts that they are made of."""
        values = dict(averages)
        for kind in ("token", "span"):
            true, predicted, gold = (values.pop(f"{kind}_{name}") for name in _COUNTS)
            values[f"{kind}_f1"] = 2.0 * true / max(predicted + gold, 1e-9)
        return values


def _token_counts(gold: Int[Array, "B S"], found: Int[Array, "B S"]) -> list[Float[Array, " B"]]:
    return [jnp.sum(tags, axis=1).astype(jnp.float32) for tags in (gold & found, found, gold)]


def _span_counts(gold: Int[Array, "B S"], found: Int[Array, "B S"]) -> list[Float[Array, " B"]]:
    """A run of tags counts as found if a run of `found` begins and ends where it does."""

    def runs(tags: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = jnp.pad(tags, ((0, 0), (1, 0)))[:, :-1]
        places = jnp.broadcast_to(jnp.arange(tags.shape[1])[None], tags.shape)
        ends = jax.lax.cummin(jnp.where(tags == 0, places, tags.shape[1]), axis=1, reverse=True)
        return (tags == 1) & (before == 0), ends

    (starts, ends), (other_starts, other_ends) = runs(gold), runs(found)
    same = starts & other_starts & (ends == other_ends)
    return [jnp.sum(which, axis=1).astype(jnp.float32) for which in (same, other_starts, starts)]


def max_pieces(run: RunContext, stage: str) -> int:
    """Of a context as the encoder of `stage` reads it; in a run of another system, what its last bucket holds."""
    shared = run.plan.system_settings
    return shared.max_piece_tokens if isinstance(shared, ReflectSettings) else run.named(stage).loop.buckets[-1]


def check_pieces_encoder(settings: EncoderSettings, run: RunContext) -> None:
    """Whether the encoder is there and reads contexts as long as the run has them."""
    most = max_pieces(run, run.stage)
    check_encoder(settings, run, max_piece_tokens=most)
    longest = run.named(run.stage).loop.buckets[-1]
    if most > longest:
        raise ConfigError(
            f"config.{run.stage}.buckets end at {longest}, but {run.shared}.max_piece_tokens = {most}; raise the last "
            "bucket to at least that, or lower the setting."
        )


def annotator_of(encoder: LoadedEncoder) -> ReasonAnnotator:
    return ReasonAnnotator(encoder.model.encoder)


def check_reasons(stage: ReasonTaskSettings, run: RunContext) -> None:
    """Raises ConfigError or DataError if there are no spans, or no such encoder."""
    check_prepared(run)
    check_pieces_encoder(stage.encoder, run)
    if stage.data == "reccon":
        for split in ("train", "validation"):
            load_examples(stage, run, split)
    if stage.data == "file":
        for split in ("train", "validation"):
            path = expand(stage.spans) / f"{split}.jsonl"
            if not path.is_file():
                raise ConfigError(f"config.{run.stage}.spans = {stage.spans!r} must hold {split}.jsonl.")
            note(f"the spans, {split}", path)


def load_examples(stage: ReasonTaskSettings, run: RunContext, split: str) -> list[SpanExample]:
    """The annotated contexts of a split. Of the sample the test split is the validation split too."""
    if stage.data == "reccon":
        return spans.read_reccon(
            spans.find_causes(run.plan.data.dir) / f"reccon_dailydialog_{spans.RECCON_SPLITS[split]}.json"
        )
    if stage.data == "sample":
        return spans.sample_examples("train" if split == "train" else "test")
    instances = load_instances(run, split)
    if stage.data == "file":
        return spans.read_spans(expand(stage.spans) / f"{split}.jsonl", instances)
    return spans.lexicon_examples(instances, stage.least_valence)


def build_reasons(stage: ReasonTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    most, tokenizer = max_pieces(run, run.stage), encoder.tokenizer
    assert isinstance(tokenizer, SubwordTokenizer)
    make = functools.partial(ReasonExamples, tokenizer=tokenizer, max_tokens=most)
    validation = draw(load_examples(stage, run, "validation"), stage.max_validation_examples)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params["encoder"]}

    def on_end(step: int, params: Params) -> None:
        del step
        finder = ReasonFinder(annotator_of(encoder), params, tokenizer, most)
        write_json(run.directory / "reasons.json", quality(finder, stage, run))

    return Assembly(
        Reasons(annotator_of(encoder)),
        make(load_examples(stage, run, "train")),
        make(validation),
        initial=initial,
        on_end=on_end,
    )


def sketch_reasons(stage: ReasonTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    encoder = load_stage_encoder(stage.encoder, run, planned=True)
    return Sketch(Reasons(annotator_of(encoder)), shapes_of(ReasonBatch, B=batch_size, S=length, T=1))


@functools.lru_cache(maxsize=8)
def _find_tags(task: Reasons) -> Any:
    """One function per annotator, so that its compiled code is found again."""
    annotator = task.annotator

    @jax.jit
    def find(params: Params, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], told: Bool[Array, "B S"]) -> Any:
        _, emissions = apply(annotator, params, ids, mask, rng=None)
        return annotator.apply({"params": params}, emissions, told & mask, method="tags")

    return find


@dataclasses.dataclass(frozen=True)
class ReasonFinder:
    """A trained annotator that marks reasons in contexts."""

    annotator: ReasonAnnotator
    params: Params
    tokenizer: SubwordTokenizer
    max_tokens: int

    def __call__(self, contexts: Sequence[Sequence[str]]) -> list[tuple[Span, ...]]:
        """The reasons in each context."""
        rows = pieces_of(self.tokenizer, contexts, self.max_tokens)
        found = []
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            size = _ROWS if len(rows) > 1 else 1
            ids, mask = features.pad([row.ids for row in part], self.max_tokens, self.tokenizer.pad_id)
            told = [[*map(int, row.told(len(c)))] for row, c in zip(part, contexts[start:], strict=False)]
            arrays = (ids, mask, features.pad(told, self.max_tokens, 0)[0].astype(bool))
            arrays = [np.pad(array, ((0, size - len(part)), (0, 0))) for array in arrays]
            tags = np.asarray(_find_tags(Reasons(self.annotator))(self.params, *arrays))
            found += [row.spans(labels) for row, labels in zip(part, tags.tolist(), strict=False)]
        return found


def load_finder(run: RunContext, stage: str) -> ReasonFinder:
    """The annotator of a finished stage."""
    settings = run.settings(stage, ReasonTaskSettings)
    encoder = load_stage_encoder(settings.encoder, run, with_params=False)
    assert isinstance(encoder.tokenizer, SubwordTokenizer)
    most = max_pieces(run, stage)
    return ReasonFinder(annotator_of(encoder), load_params(run.files.stage(stage)), encoder.tokenizer, most)


def quality(finder: ReasonFinder, stage: ReasonTaskSettings, run: RunContext) -> dict[str, Any]:
    """How well the annotator marks what people have marked, where their spans or cause turns are at hand.

    `held_out` is the F1 of pieces and of whole spans, in percent, on the test split of the stage's data; `lexicon` is
    that of VADER's words on the same contexts. `cause_turns` compares the turns with a reason to the cause turns of
    EmpatheticDialogues' test split, among the speaker's turns.
    """
    found: dict[str, Any] = {"data": stage.data}
    if stage.data in ("reccon", "sample"):
        gold = load_examples(stage, run, "test")
        contexts = [one.context for one in gold]
        found["held_out"] = _agreement(finder, gold, finder(contexts))
        found["lexicon"] = _agreement(finder, gold, [spans.lexicon_spans(c, stage.least_valence) for c in contexts])
        log.info("%s: F1 of pieces %.1f, of spans %.1f", run.stage, *found["held_out"].values())
    if run.plan.data.name == "empathetic_dialogues" and stage.data == "reccon":
        path = spans.find_causes(run.plan.data.dir) / "empathetic_dialogues_test_causes.jsonl"
        if path.is_file():
            found["cause_turns"] = _turn_agreement(finder, load_instances(run, "test"), spans.read_cause_turns(path))
    return found


def _agreement(finder: ReasonFinder, gold: Sequence[SpanExample], found: Sequence[Sequence[Span]]) -> dict[str, float]:
    rows = pieces_of(finder.tokenizer, [one.context for one in gold], finder.max_tokens)
    wanted = [row.labels(one.spans) for row, one in zip(rows, gold, strict=True)]
    given = [row.labels(own) for row, own in zip(rows, found, strict=True)]
    tokens, whole = spans.span_counts(wanted, given)
    return {"token_f1": round(spans.f1(tokens), 2), "span_f1": round(spans.f1(whole), 2)}


def _turn_agreement(
    finder: ReasonFinder, instances: Sequence[Instance], causes: dict[str, tuple[int, ...]]
) -> dict[str, float]:
    """F1 of the turns that hold a reason, in the longest context of each dialogue."""
    longest = {i.dialogue_id: i for i in instances if i.dialogue_id in causes}
    counts = np.zeros(3, np.int64)
    for instance, found in zip(longest.values(), finder([i.context for i in longest.values()]), strict=True):
        size = len(instance.context)
        told = {turn for turn in range(size) if spans.is_speakers(turn, size)}
        gold, given = told & set(causes[instance.dialogue_id]), {span.turn for span in found}
        counts += [len(gold & given), len(given), len(gold)]
    return {"turn_f1": round(spans.f1(counts), 2), "dialogues": len(longest)}
