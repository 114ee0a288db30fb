"""Stage "evaluate": answers the test split in predictions.jsonl, or another corpus in the stage's own folder."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from empax.core.config import ConfigError, check_numbers
from empax.core.files import hash_file, write_json, write_jsonl
from empax.core.protocols import Answering
from empax.core.system import AnswerOptions, RunContext, RunPlan
from empax.core.types import Instance
from empax.data import dailydialog, own
from empax.data.batches import DRAWN, draw_dialogues
from empax.data.store import check_prepared, load_instances, may_load
from empax.decoding.settings import DecodeSettings
from empax.evaluation.rows import released
from empax.evaluation.scoring import JUDGES
from empax.pipeline import annotate, judging
from empax.pipeline.answers import KeptAnswers, identify
from empax.pipeline.bart_score import BartScorer, bart_scored, check_bart
from empax.training.settings import check_buckets, kept_steps

log = logging.getLogger("empax")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      stage: training stage to evaluate.
      step: the step whose parameters answer, a multiple of the stage's `keep_every_steps`; 0 = the parameters that it
        chose by validation.
      decoding: decoding settings instead of the system's own `decoding`, to compare systems with the same decoder; None
        = the system's.
      index: index stage to search; without effect on a task that searches none, or the one that it was trained with.
      corpus: corpus to answer; empty = the run's own data; "dailydialog" must be in `config.data.dir` and has no known
        emotions, so no head is chosen.
      limit: maximum number of instances, from randomly drawn dialogues that do not depend on the seed (0 = all).
      head_examples: validation instances for choosing the best emotion head, drawn with the run's seed: the first ones
        of EmpatheticDialogues are far harder than the rest.
      judge: judge of responses and references (for the F1s of the mechanisms): an annotate stage (its classifiers), a
        stage that trained identifiers, or a list of such stages; empty = none.
      second_judge: judge for variants "...:second_seed": of the same kind, trained with another seed and never used as
        a training signal.
      bart_score: folder of a BART that scores responses (`pipeline.bart_score`); empty = no such scores.
      linear_judge: whether to add the judge `parts.attributes.linear`, for variants "...:linear", if EPITOME exists.
    """

    stage: str
    step: int = 0
    decoding: DecodeSettings | None = None
    index: str = "reindex"
    corpus: Literal["", "dailydialog"] = ""
    split: str = "test"
    batch_size: int = 32
    buckets: tuple[int, ...] = (64, 128, 256, 512)
    limit: int = 0
    head_examples: int = 2000
    judge: str | tuple[str, ...] = ""
    second_judge: str | tuple[str, ...] = ""
    linear_judge: bool = False
    bart_score: str = ""

    def __post_init__(self) -> None:
        check_numbers(self, "batch_size", "head_examples", least=1)
        check_numbers(self, "step", "limit", least=0)
        check_buckets(self.buckets)
        if self.split not in own.SPLITS:
            raise ConfigError(f"split = {self.split!r} must be one of {', '.join(own.SPLITS)}.")


def main_stage(plan: RunPlan) -> str:
    """Returns the stage that makes the run's predictions: the first one on the run's own data; empty without one.

    Other stages write predictions to their own folders.
    """
    own = (s.name for s in plan.stages.values() if s.kind == "evaluate" and not s.settings.corpus)
    return next(own, "")


def check(settings: Settings, run: RunContext) -> None:
    """Checks that the answering model and the judges are trained before, and that the other corpus exists.

    Raises:
      ConfigError: a stage is missing or trains something else, nothing reads `index`, or `config.data.dir` lacks
        DailyDialog or has only a part of EPITOME.
      DataError: a file of DailyDialog, or of EPITOME for the linear judge, is damaged.
    """
    check_prepared(run)
    decoded = decoded_by(settings, run)
    answering = run.earlier("stage", settings.stage, able=("answers", lambda spec: spec.answer is not None))
    assert answering.spec is not None
    if settings.step and settings.step not in kept_steps(answering.loop):
        loop, of = answering.loop, f"config.{settings.stage}"
        raise ConfigError(
            f"config.{run.stage}.step = {settings.step} is not a step whose parameters {of} keeps ({loop.steps} steps, "
            f"keep_every_steps = {loop.keep_every_steps}); set {of}.keep_every_steps to a divisor of a step that {of} "
            "reaches, or step to 0."
        )
    if answering.spec.searches:
        run.earlier("index", settings.index, kind="index")
    elif settings.index not in ("", Settings.index, trained_with := getattr(answering.settings, "index", "")):
        raise ConfigError(
            f"config.{run.stage}.index = {settings.index!r} is not the index that config.{settings.stage} answers with "
            f"({trained_with or 'none'}); set it to ''."
        )
    answering.spec.check_evaluation(answering.settings, decoded)
    for setting in ("judge", "second_judge"):
        if names := getattr(settings, setting):
            judging.check_judges(setting, names, run)
    if settings.bart_score and may_load(run, settings.bart_score):
        check_bart(settings.bart_score)
    if settings.linear_judge:
        judging.check_linear(run.plan.data.dir)
    if settings.corpus:
        dailydialog.load_instances(dailydialog.find_dailydialog(run.plan.data.dir, split=settings.split))


def run(settings: Settings, run: RunContext) -> None:
    answerer = load_answerer(settings, run, settings.buckets)
    options: dict[str, Any] = {"batch_size": settings.batch_size, "seed": run.seed}
    about: dict[str, Any] = {}
    head = ""
    if not settings.corpus:
        validation = load_instances(run, "validation")
        drawn = np.random.default_rng(run.seed).permutation(len(validation))[: settings.head_examples]
        validation = [validation[i] for i in np.sort(drawn)]
        accuracy = head_accuracies(validation, answerer.emotions(validation, **options))
        head = max(accuracy, key=lambda name: accuracy[name], default="")
        if head:
            about |= {"emotion_head": head, "emotion_head_validation_accuracy": accuracy}
            shares = ", ".join(f"{name} {share:.1f}%" for name, share in accuracy.items())
            log.info("accuracy of emotion heads on validation: %s; predictions come from: %s", shares, head)
    instances, counts = find_instances(settings, run)
    kept = KeptAnswers(run.directory / "parts", identify(run, settings, instances))
    predictions = answerer.respond(instances, progress=settings.corpus or settings.split, kept=kept, **options)
    kept.flush()
    predictions = [
        dataclasses.replace(p, emotion_prediction=p.notes["emotion_by_head"][head] if head else "") for p in predictions
    ]
    for names, prefix in ((settings.judge, ""), (settings.second_judge, f"{JUDGES[0]}_")):
        judges = judging.load_judges(names, run) if names else []
        if judges:
            predictions = judging.judged(predictions, judges, prefix=prefix)
    if settings.linear_judge:
        jury = judging.linear_jury(run.plan.data.dir)
        predictions, about["linear_judge"] = jury(predictions), jury.about()
    if settings.bart_score:
        predictions = bart_scored(predictions, BartScorer.load(settings.bart_score))
    path = run.files.predictions
    if run.stage != main_stage(run.plan):
        path = run.files.evaluation(run.stage)
        about |= {"stage": settings.stage, "corpus": settings.corpus, "split": settings.split}
    about |= {"data": counts, "responses_per_second": len(predictions) / kept.seconds, "seconds": kept.seconds}
    write_json(run.directory / "evaluate.json", about)
    write_jsonl(path, predictions)
    if path == run.files.predictions:
        write_jsonl(run.files.outputs, map(released, predictions))
    kept.remove()


def decoded_by(settings: Settings, run: RunContext) -> RunContext:
    """Replaces the system's decoding settings in the run by `settings.decoding`, if given.

    Raises:
      ConfigError: the system does not support it, or uses its pretrained generator's own settings.
    """
    if settings.decoding is None:
        return run
    shared = run.plan.system_settings
    if getattr(shared, "own_decoding", False):
        raise ConfigError(
            f"config.{run.stage}.decoding is not read where {run.shared}.own_decoding = True; set only one of them."
        )
    changed = dataclasses.replace(shared, decoding=settings.decoding)
    return dataclasses.replace(run, plan=dataclasses.replace(run.plan, system_settings=changed))


def load_answerer(settings: Settings, run: RunContext, buckets: Sequence[int]) -> Answering:
    """Loads the answering model of the stage in `settings`; it pads sources to `buckets`.

    Raises:
      ConfigError: the stage has none.
    """
    stage = run.named(settings.stage)
    if stage.spec is None or stage.spec.answer is None:
        what = f"trains {stage.task!r}" if stage.task else f"is of kind {stage.kind!r}"
        raise ConfigError(f"config.{run.stage}.stage = {settings.stage!r} {what}, which answers nothing.")
    options = AnswerOptions(stage.name, settings.index, buckets, settings.step or "best")
    return stage.spec.answer(stage.settings, decoded_by(settings, run), options)


def find_instances(settings: Settings, run: RunContext) -> tuple[list[Instance], dict[str, Any]]:
    """Returns the instances to answer, and counts: all instances, answered ones, how they were chosen, and, for another
    corpus, its hash."""
    limits, counts = [settings.limit], {}
    if settings.corpus:
        data = run.plan.data
        path = dailydialog.find_dailydialog(data.dir, split=settings.split)
        instances = dailydialog.load_instances(path)
        limits.append(data.limit)
        counts["source_hash"] = hash_file(path)
    else:
        instances = load_instances(run, settings.split)
    answered = draw_dialogues(instances, min((limit for limit in limits if limit), default=0))
    if settings.corpus:
        answered = annotate.with_context_notes(answered, run)
    chosen = {"chosen": DRAWN} if len(answered) < len(instances) else {}
    return answered, {**counts, "instances": len(instances), "answered": len(answered), **chosen}


def head_accuracies(instances: Sequence[Instance], found: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Computes the accuracy of each emotion head in percent, from its output `found`, where the emotion is known.

    The result is empty if no emotion is known, or without a head that has learnt emotions.
    """
    known = [(i.emotion, by_head) for i, by_head in zip(instances, found, strict=True) if i.emotion]
    if not known:
        return {}
    return {head: 100.0 * float(np.mean([by_head[head] == emotion for emotion, by_head in known])) for head in found[0]}
