"""Task "reasons": ReflectDiffu's Emotion Reason Annotator (ERA), which marks the words that explain an emotion.

It is trained on spans that people or a lexicon marked.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.files import write_json
from empax.core.inputs import note
from empax.core.paths import expand
from empax.core.protocols import Tokenizer
from empax.core.shapes import shapes_of
from empax.core.system import Assembly, RunContext, Sketch
from empax.core.types import Batch, Instance, Mean, Metrics, Params
from empax.data import features, spans
from empax.data.batches import draw
from empax.data.exemplars import padded
from empax.data.spans import PlacedRow, Span, SpanExample, place_contexts
from empax.data.store import check_prepared, load_instances
from empax.interop.pretrained_encoders import EncoderSettings
from empax.models.arithmetic import contract
from empax.models.layers import MASKED, apply, normal
from empax.parts.attributes.crf import log_likelihood, viterbi
from empax.parts.encoder.stages import check_encoder, load_stage_encoder
from empax.training.checkpoint import load_params

log = logging.getLogger("empax")

_ROWS = 64  # batch size for annotating contexts
_COUNTS = ("true", "predicted", "gold")
_TAGS = 2  # 1 marks a reason (the paper's <em>), 0 any other word (<noem>)


@dataclasses.dataclass(frozen=True)
class ReasonTaskSettings:
    """Settings of the annotator of reasons.

    Attributes:
      data: source of the spans: "reccon" (people's, of DailyDialog), "sample" (people's, of the built-in corpus),
        "file" (yours), or "lexicon" (VADER's emotion words, in the run's own contexts).
      spans: for "file", a folder with train.jsonl and validation.jsonl (`data.spans.read_spans`).
      max_validation_examples: maximum examples of validation; 0 = all.
    """

    encoder: EncoderSettings = dataclasses.field(default_factory=EncoderSettings)
    data: Literal["reccon", "sample", "file", "lexicon"] = "reccon"
    spans: str = ""
    max_validation_examples: int = 1000

    def __post_init__(self) -> None:
        check_numbers(self, "max_validation_examples", least=0)
        if (self.data == "file") != bool(self.spans):
            raise ConfigError(f"spans = {self.spans!r} goes with data = 'file', but data = {self.data!r}.")


@flax.struct.dataclass
class ReasonBatch(Batch):
    """Contexts in pieces with their tags; the target is empty."""

    tags: Int[Array, "B S"]
    told: Bool[Array, "B S"]  # True at the speaker's pieces


class ReasonAnnotator(nn.Module):
    r"""An encoder with attention over all tokens of the conversation, and a CRF over the speaker's tokens.

    .. math:: \alpha_{ij} = \mathrm{softmax}_j(q_i \cdot k_j / \sqrt D), \quad \tilde h_i = h_i + \sum_j \alpha_{ij} h_j

    Source: ReflectDiffu, Eq. 13 to 16; the score of a pair is ours. Departure: Eq. 15 omits h_i itself, so that words
    with the same attention would be identical.

    Parameters are the encoder's under "encoder", and those of the composition and the CRF ("transitions").
    """

    encoder: nn.Module  # a BertEncoder: `(ids[B,S], mask[B,S], deterministic=) -> states[B,S,D]`

    @nn.compact
    def __call__(
        self, ids: Int[Array, "B S"], mask: Bool[Array, "B S"], *, deterministic: bool = True
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S C"]]:
        """Returns the reasoning representations and the emissions of the CRF, float32."""
        size = self.encoder.config.d_model  # pyright: ignore[reportAttributeAccessIssue]
        query_weight, key_weight = (self.param(name, normal(size**-0.5), (size, size)) for name in ("query", "key"))
        emission = self.param("emission", normal(size**-0.5), (size, _TAGS))
        offset = self.param("emission_bias", nn.initializers.zeros, (_TAGS,))
        self.param("transitions", nn.initializers.zeros, (_TAGS, _TAGS))
        states = self.encoder(ids, mask, deterministic=deterministic).astype(jnp.float32)  # type: ignore[operator]
        query = contract("BSD,DE->BSE", states, query_weight) * states.shape[-1] ** -0.5
        scores = jnp.einsum("BSE,BTE->BST", query, contract("BSD,DE->BSE", states, key_weight))
        weights = jax.nn.softmax(jnp.where(mask[:, None, :], scores, MASKED), axis=-1)
        composed = states + jnp.einsum("BST,BTD->BSD", weights, states)
        return composed, contract("BSD,DC->BSC", composed, emission) + offset[None, None]


def pieces_of(tokenizer: Tokenizer, contexts: Sequence[Sequence[str]], max_tokens: int) -> list[PlacedRow]:
    """Renders `[CLS] turn [SEP] turn [SEP] ...` for encoders of contexts; the oldest pieces are cut."""
    return place_contexts(tokenizer, contexts, max_tokens=max_tokens, first=tokenizer.cls_id, behind=tokenizer.sep_id)


def told_of(rows: Sequence[PlacedRow], contexts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Returns for each id of a context's row whether it belongs to the speaker's words (1) or not (0)."""
    return [[*map(int, row.told(len(context)))] for row, context in zip(rows, contexts, strict=True)]


class ReasonExamples:
    """Random-access examples of annotated contexts."""

    def __init__(self, examples: Sequence[SpanExample], tokenizer: Tokenizer, max_tokens: int):
        contexts = [one.context for one in examples]
        rows = pieces_of(tokenizer, contexts, max_tokens)
        self.ids, self.told = [row.ids for row in rows], told_of(rows, contexts)
        self.tags = [row.labels(one.spans) for row, one in zip(rows, examples, strict=True)]
        self.pad_id = tokenizer.pad_id
        self.lengths = np.array([len(ids) for ids in self.ids])

    def __len__(self) -> int:
        return len(self.ids)

    def collate(self, indices: np.ndarray, length: int, rng: np.random.Generator) -> ReasonBatch:
        del rng
        source, mask = padded(self.ids, indices, length, self.pad_id)
        tags, told = (padded(values, indices, length, 0)[0] for values in (self.tags, self.told))
        none, valid = np.zeros((len(indices), 1), np.int32), np.asarray(indices) >= 0
        return ReasonBatch(source, mask, none, none > 0, valid, tags, told > 0)  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Reasons:
    """The negative log-likelihood of the tags of the speaker's pieces; F1 of pieces and of whole spans."""

    annotator: ReasonAnnotator

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return self.annotator.init(rng, batch.source, batch.source_mask)["params"]

    def loss(self, params: Params, frozen: Params, batch: Any, rng: jax.Array, *, train: bool) -> tuple[Mean, Metrics]:
        told = batch.told & batch.source_mask & batch.valid[:, None]
        read = batch.source, batch.source_mask
        _, emissions = apply(self.annotator, params, *read, rng=rng if train else None)
        loss = Mean.of(-log_likelihood(emissions, params["transitions"], batch.tags, told), batch.valid)
        if train:
            return loss, {}
        found, gold = viterbi(emissions, params["transitions"], told), jnp.where(told, batch.tags, 0)
        counted = {"token": (gold & found, found, gold), "span": _span_starts(gold, found)}
        metrics = {
            f"{kind}_{name}": Mean.of(places.sum(axis=1).astype(jnp.float32), batch.valid)
            for kind, three in counted.items()
            for name, places in zip(_COUNTS, three, strict=True)
        }
        return loss, metrics

    def summarize(self, averages: dict[str, float]) -> dict[str, float]:
        """Replaces counts by `token_f1` and `span_f1`, which are shares."""
        values = dict(averages)
        for kind in ("token", "span"):
            true, predicted, gold = (values.pop(f"{kind}_{name}") for name in _COUNTS)
            values[f"{kind}_f1"] = 2.0 * true / max(predicted + gold, 1e-9)
        return values


def _span_starts(gold: Int[Array, "B S"], found: Int[Array, "B S"]) -> tuple[Bool[Array, "B S"], ...]:
    """Returns the starts of tag runs: those of `gold` that match a run of `found`, all of `found`, all of `gold`."""

    def runs(tags: jax.Array) -> tuple[jax.Array, jax.Array]:
        before = jnp.pad(tags, ((0, 0), (1, 0)))[:, :-1]
        places = jnp.broadcast_to(jnp.arange(tags.shape[1])[None], tags.shape)
        ends = jax.lax.cummin(jnp.where(tags == 0, places, tags.shape[1]), axis=1, reverse=True)
        return (tags == 1) & (before == 0), ends

    (starts, ends), (other_starts, other_ends) = runs(gold), runs(found)
    return starts & other_starts & (ends == other_ends), other_starts, starts


def max_pieces(run: RunContext, stage: str) -> int:
    """Returns the maximum pieces of a context for the annotator of `stage`: those of its last bucket."""
    return run.named(stage).loop.buckets[-1]


def check_reasons(stage: ReasonTaskSettings, run: RunContext) -> None:
    """Raises ConfigError or DataError if the spans or the encoder do not exist."""
    check_prepared(run)
    check_encoder(stage.encoder, run, buckets=max_pieces(run, run.stage))
    if stage.data == "reccon":
        for split in spans.RECCON_SPLITS:
            load_examples(stage, run, split)
    if stage.data == "file":
        for split in ("train", "validation"):
            path = expand(stage.spans) / f"{split}.jsonl"
            if not path.is_file():
                raise ConfigError(f"config.{run.stage}.spans = {stage.spans!r} must hold {split}.jsonl.")
            note(f"the spans, {split}", path)


def load_examples(stage: ReasonTaskSettings, run: RunContext, split: str) -> list[SpanExample]:
    """Loads the annotated contexts of a split. In the sample, the test split is also the validation split."""
    if stage.data == "reccon":
        return spans.read_reccon(
            spans.find_causes(run.plan.data.dir) / f"reccon_dailydialog_{spans.RECCON_SPLITS[split]}.json"
        )
    if stage.data == "sample":
        return spans.sample_examples("train" if split == "train" else "test")
    instances = load_instances(run, split)
    if stage.data == "file":
        return spans.read_spans(expand(stage.spans) / f"{split}.jsonl", instances, some=bool(run.plan.data.limit))
    return spans.lexicon_examples(instances)


def build_reasons(stage: ReasonTaskSettings, run: RunContext) -> Assembly:
    encoder = load_stage_encoder(stage.encoder, run)
    annotator, most, tokenizer = ReasonAnnotator(encoder.model.encoder), max_pieces(run, run.stage), encoder.tokenizer
    make = functools.partial(ReasonExamples, tokenizer=tokenizer, max_tokens=most)
    validation = draw(load_examples(stage, run, "validation"), stage.max_validation_examples)

    def initial(params: Params) -> Params:
        return params if encoder.params is None else {**params, "encoder": encoder.params["encoder"]}

    def on_end(step: int, params: Params) -> None:
        del step
        finder = ReasonFinder(annotator, params, tokenizer, most)
        write_json(run.directory / "reasons.json", quality(finder, stage, run))

    train = make(load_examples(stage, run, "train"))
    return Assembly(Reasons(annotator), train, make(validation), initial=initial, on_end=on_end)


def sketch_reasons(stage: ReasonTaskSettings, run: RunContext, batch_size: int, length: int) -> Sketch:
    annotator = ReasonAnnotator(load_stage_encoder(stage.encoder, run, planned=True).model.encoder)
    return Sketch(Reasons(annotator), shapes_of(ReasonBatch, B=batch_size, S=length, T=1))


def read_reasons(
    annotator: ReasonAnnotator,
    params: Params,
    ids: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    told: Bool[Array, "B S"],
) -> tuple[Float[Array, "B S D"], Int[Array, "B S"]]:
    """Returns the reasoning representations of pieces, and 1 at the speaker's (`told`) that are reasons."""
    composed, emissions = apply(annotator, params, ids, mask, rng=None)
    return composed, viterbi(emissions, params["transitions"], told & mask)


_find_tags = jax.jit(lambda annotator, *given: read_reasons(annotator, *given)[1], static_argnums=0)


@dataclasses.dataclass(frozen=True)
class ReasonFinder:
    """A trained annotator that marks reasons in contexts."""

    annotator: ReasonAnnotator
    params: Params
    tokenizer: Tokenizer
    max_tokens: int

    def __call__(self, contexts: Sequence[Sequence[str]]) -> list[tuple[Span, ...]]:
        """Returns the reasons in each context."""
        rows = pieces_of(self.tokenizer, contexts, self.max_tokens)
        found = []
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            told = told_of(part, contexts[start : start + _ROWS])
            ids, mask = features.pad([row.ids for row in part], self.max_tokens, self.tokenizer.pad_id)
            filler = (0, (_ROWS if len(rows) > 1 else 1) - len(part)), (0, 0)
            arrays = [np.pad(array, filler) for array in (ids, mask, features.pad(told, self.max_tokens, 0)[0] > 0)]
            tags = np.asarray(_find_tags(self.annotator, self.params, *arrays))
            found += [row.spans(labels) for row, labels in zip(part, tags.tolist(), strict=False)]
        return found


def load_finder(run: RunContext, stage: str) -> ReasonFinder:
    """Loads the annotator of a finished stage."""
    encoder = load_stage_encoder(run.settings(stage, ReasonTaskSettings).encoder, run, with_params=False)
    annotator, params = ReasonAnnotator(encoder.model.encoder), load_params(run.files.stage(stage))
    return ReasonFinder(annotator, params, encoder.tokenizer, max_pieces(run, stage))


def quality(finder: ReasonFinder, stage: ReasonTaskSettings, run: RunContext) -> dict[str, Any]:
    """Measures the annotator's agreement with people, if their spans or cause turns are available.

    `held_out` is the F1 of pieces and of spans, in percent, on the test split of the stage's data, `lexicon` that of
    VADER's words; `cause_turns` compares the speaker's turns that have a reason with the cause turns of the
    test split of EmpatheticDialogues.
    """
    found: dict[str, Any] = {"data": stage.data}
    if stage.data in ("reccon", "sample"):
        gold = load_examples(stage, run, "test")
        contexts = [one.context for one in gold]
        found["held_out"] = _agreement(finder, gold, finder(contexts))
        found["lexicon"] = _agreement(finder, gold, [spans.lexicon_spans(c) for c in contexts])
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
    """Returns the F1 of the turns that have a reason, in the longest context of each dialogue.

    `every_turn_f1` is that of naming all turns of the speaker.
    """
    longest = {i.dialogue_id: i for i in instances if i.dialogue_id in causes}
    counts, every = np.zeros((2, 3), np.int64)
    for instance, found in zip(longest.values(), finder([i.context for i in longest.values()]), strict=True):
        size = len(instance.context)
        told = {turn for turn in range(size) if spans.is_speakers(turn, size)}
        gold, given = told & set(causes[instance.dialogue_id]), {span.turn for span in found}
        counts += [len(gold & given), len(given), len(gold)]
        every += [len(gold), len(told), len(gold)]
    f1, every_f1 = (round(spans.f1(one), 2) for one in (counts, every))
    return {"turn_f1": f1, "every_turn_f1": every_f1, "dialogues": len(longest)}
