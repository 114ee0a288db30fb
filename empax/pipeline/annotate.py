"""Stage "annotate": labels every instance and every exemplar with emotion attributes (REG, Eq. 1).

`context_attributes` belong to the context alone: all that is known before the response. `response_attributes` belong
to the training pairs (context and response), which serve as exemplars; validation and test have none, so that no gold
response can reach an input.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from empax.core.cache import kept_rows
from empax.core.config import ConfigError
from empax.core.files import hash_json, write_json, write_jsonl
from empax.core.settings import cache_dir
from empax.core.system import RunContext
from empax.core.types import ATTRIBUTES, LEVELS, MECHANISMS, Instance
from empax.data.own import SPLITS
from empax.data.store import check_prepared, check_sole, prepared_instances
from empax.evaluation.empathy import accuracy, confusion_matrix, f1, merge_levels, sentiment
from empax.parts import attributes

log = logging.getLogger("empax")

THRESHOLD = 0.05
"""Absolute compound score of VADER from which a text is "high" (or, negative, "low"), as its authors advise."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      classifiers: stages that trained the classifiers; together they must cover all three mechanisms, except those in
        `left_out`.
      left_out: mechanisms without a classifier, and so without attributes. If EPITOME is missing, a recipe whose
        classifiers have `data = "if_there"` gets them here.
      contexts: whether to annotate contexts. False where nothing reads those annotations, as in LEMPEx.
      reasons: stage whose annotator marks reasons in contexts, for the note "reasons" ([turn, start, end] of each, in
        characters); empty = none.
    """

    classifiers: tuple[str, ...] = ("attributes",)
    left_out: tuple[str, ...] = ()
    contexts: bool = True
    reasons: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.left_out) - set(MECHANISMS):
            raise ConfigError(
                f"left_out = {self.left_out} must be some of {', '.join(MECHANISMS)}, not {min(unknown)!r}."
            )
        if not self.classifiers and set(self.left_out) != set(MECHANISMS):
            raise ConfigError(
                "classifiers = () must name at least one stage of attributes.classifier, or left_out all of "
                f"{', '.join(MECHANISMS)}."
            )


def sentiment_levels(texts: Sequence[str]) -> list[str]:
    """Rates texts low, mid or high by VADER's compound score. Source: Hutto and Gilbert 2014; VADER's thresholds."""
    return ["high" if c >= THRESHOLD else "low" if c <= -THRESHOLD else "mid" for c in map(sentiment, texts)]


def judge_levels(
    judges: Sequence[attributes.Judge], contexts: Sequence[Sequence[str]], responses: Sequence[str]
) -> list[dict[str, str]]:
    """Returns the attributes' levels for each text, in the order of ATTRIBUTES: sentiment, and the judges' labels."""
    texts = [" ".join([*run, response]).strip() for run, response in zip(contexts, responses, strict=True)]
    columns = {"sentiment": sentiment_levels(texts)}
    for judge in judges:
        best = judge(contexts, responses).argmax(axis=-1)
        for c, mechanism in enumerate(judge.task.mechanisms):
            columns[mechanism] = [LEVELS[level] for level in best[:, c]]
    return [{name: columns[name][row] for name in ATTRIBUTES if name in columns} for row in range(len(texts))]


def load_judges(settings: Settings, run: RunContext) -> list[attributes.ClassifierJudge]:
    """Loads the classifiers of finished stages that passed `check`."""
    return [cast(attributes.ClassifierJudge, attributes.load_judge(run, stage)) for stage in settings.classifiers]


def check_coverage(mechanisms: Iterable[str], where: str) -> None:
    """Raises ConfigError unless `mechanisms`, those of all judges and those left out, are all three, each once."""
    covered = list(mechanisms)
    if missing := [name for name in MECHANISMS if name not in covered]:
        raise ConfigError(f"{where} lacks a classifier of {', '.join(missing)}.")
    if twice := [name for name in MECHANISMS if covered.count(name) > 1]:
        raise ConfigError(
            f"{where} has several judges of {', '.join(twice)}, and labels can come from one alone; name fewer stages."
        )


def check(settings: Settings, run: RunContext) -> None:
    """Checks that the classifiers are trained before and cover the mechanisms.

    Raises:
      ConfigError: no earlier stage trains a classifier of that name, a mechanism has no classifier and is not left out,
        or it has several, or one and is left out; or another stage annotates.
    """
    check_prepared(run)
    check_sole(run)
    for stage in settings.classifiers:
        run.earlier("classifiers", stage, tasks=("attributes.classifier",))
    levelled = [attributes.judge_stage(run, stage).mechanisms for stage in settings.classifiers]
    if both := set(settings.left_out) & set(itertools.chain(*levelled)):
        raise ConfigError(
            f"config.{run.stage}.left_out names {min(both)}, which a stage of config.{run.stage}.classifiers labels; "
            "take it out of one of the two."
        )
    check_coverage(itertools.chain(*levelled, settings.left_out), f"config.{run.stage}.classifiers")
    if settings.reasons:
        run.earlier("reasons", settings.reasons, able=("marks reasons", lambda spec: spec.marker is not None))


def load_marker(settings: Settings, run: RunContext) -> Callable[[Sequence[Sequence[str]]], Sequence[Any]] | None:
    """Loads the annotator that marks reasons in contexts; None without one."""
    spec = run.named(settings.reasons).spec if settings.reasons else None
    return spec.marker(run, settings.reasons) if spec is not None and spec.marker is not None else None


def context_notes(
    contexts: Sequence[Sequence[str]],
    judges: Sequence[attributes.Judge],
    mark: Callable[[Sequence[Sequence[str]]], Sequence[Any]] | None,
    *,
    levels: bool,
) -> list[dict[str, Any]]:
    """Returns the notes on contexts outside the run's splits: "reasons" by `mark`, "context_attributes" if `levels`."""
    notes: list[dict[str, Any]] = [{} for _ in contexts]
    if mark is not None:
        notes = [{"reasons": list(map(list, spans))} for spans in mark(contexts)]
    if levels:
        found = judge_levels(judges, contexts, [""] * len(contexts))
        notes = [{**note, "context_attributes": one} for note, one in zip(notes, found, strict=True)]
    return notes


def with_context_notes(instances: Sequence[Instance], run: RunContext) -> list[Instance]:
    """Adds to instances of another corpus what the annotate stages before this one note on contexts."""
    found = list(instances)
    for stage in (run.named(name) for name in run.before()):
        if stage.kind == "annotate":
            settings = stage.settings
            judges = load_judges(settings, run) if settings.contexts else []
            mark, contexts = load_marker(settings, run), [i.context for i in found]
            notes = context_notes(contexts, judges, mark, levels=settings.contexts)
            found = [dataclasses.replace(i, notes={**i.notes, **note}) for i, note in zip(found, notes, strict=True)]
    return found


def run(settings: Settings, run: RunContext) -> None:
    judges, mark = load_judges(settings, run), load_marker(settings, run)
    made_by = [judge.hash for judge in judges]
    for split in SPLITS:
        instances = prepared_instances(run, split)
        rows = _annotated(instances, judges, settings, split, hash_json([made_by, THRESHOLD]))
        if mark is not None:
            marked = mark([i.context for i in instances])
            rows = [{**row, "reasons": list(map(list, spans))} for row, spans in zip(rows, marked, strict=True)]
        write_jsonl(run.files.notes(run.stage, split), rows)
    write_json(run.directory / "classifiers.json", held_out_quality(settings.classifiers, run, judges))


def _annotated(
    instances: list[Instance], judges: Sequence[attributes.Judge], settings: Settings, split: str, made_by: str
) -> list[dict[str, Any]]:
    """Makes one row per instance; caches rows across runs under a hash of the texts, classifiers and settings."""
    texts = [(i.id, i.context, i.response if split == "train" else "") for i in instances]
    path = cache_dir() / "annotations" / f"{hash_json([made_by, settings.contexts, split, texts])}.jsonl"

    def rows() -> list[dict[str, Any]]:
        responses = {"context_attributes": [""] * len(instances)} if settings.contexts else {}
        if split == "train":
            responses["response_attributes"] = [i.response for i in instances]
        contexts = [i.context for i in instances]
        columns = {note: judge_levels(judges, contexts, said) for note, said in responses.items()}
        return [
            {"id": i.id, **{note: levels[row] for note, levels in columns.items()}} for row, i in enumerate(instances)
        ]

    return kept_rows(path, rows)


def held_out_quality(stages: Sequence[str], run: RunContext, judges: Sequence[attributes.Judge]) -> dict[str, Any]:
    """Computes accuracy, weighted F1 (also for two classes) and confusion by judge and mechanism, on held-out posts.

    They are slightly too high: a judge's best checkpoint was chosen on the same posts.
    With two classes, mid and high are merged, as in LEMPEx' released code. A second judge of a mechanism has the key
    "STAGE/MECHANISM".
    """
    quality: dict[str, Any] = {}
    for judge, stage in zip(judges, stages, strict=True):
        holdout = attributes.load_holdout(run, stage)
        predicted = judge([p.context for p in holdout], [p.response for p in holdout]).argmax(axis=-1)
        for c, mechanism in enumerate(judge.task.mechanisms):
            gold = [LEVELS[p.levels[c]] for p in holdout]
            guess = [LEVELS[level] for level in predicted[:, c]]
            two = merge_levels(gold), merge_levels(guess)
            key = f"{stage}/{mechanism}" if mechanism in quality else mechanism
            quality[key] = {
                "accuracy": accuracy(gold, guess),
                "weighted_f1": f1(gold, guess, "weighted"),
                "binary_accuracy": accuracy(*two),
                "binary_weighted_f1": f1(*two, "weighted"),
                "confusion": confusion_matrix(gold, guess, LEVELS).tolist(),
                "pairs": len(gold),
            }
            log.info("%s: accuracy %.1f, weighted F1 %.1f", key, quality[key]["accuracy"], quality[key]["weighted_f1"])
    return quality
