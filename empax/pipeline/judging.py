"""Who judges responses for their empathy: the classifiers or identifiers of this run, or those of another one."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.paths import expand
from empax.core.system import RunContext
from empax.core.types import MECHANISMS, Prediction
from empax.evaluation.rows import with_notes
from empax.parts import attributes
from empax.parts.attributes import Judge
from empax.parts.attributes.linear import LinearJudge, load_linear
from empax.pipeline import annotate
from empax.pipeline.plan import read_plan
from empax.training.checkpoint import CheckpointError

log = logging.getLogger("empax")

_THRESHOLD = annotate.Settings.sentiment_threshold


def load_judges(names: str | Sequence[str], run: RunContext) -> tuple[list[Judge], float]:
    """The judges of the named stages of this run, and the threshold of VADER beside them.

    Of an annotate stage its classifiers are meant; the others train judges.

    Raises:
      ConfigError: a stage that is neither, or a mechanism without a judge, unless an annotate stage leaves it out.
    """
    judges: list[Judge] = []
    left_out: list[str] = []
    threshold = _THRESHOLD
    for name in [names] if isinstance(names, str) else names:
        if run.named(name).kind == "annotate":
            labels = run.settings(name, annotate.Settings)
            judges += annotate.load_judges(labels, run)
            left_out += labels.left_out
            threshold = labels.sentiment_threshold
        else:
            judges.append(attributes.load_judge(run, name))
    levelled = [judge.task.mechanisms for judge in judges]
    annotate.check_coverage(itertools.chain(*levelled, left_out), f"config.{run.stage}.judge")
    return judges, threshold


def check_judges(setting: str, names: str | Sequence[str], run: RunContext) -> None:
    """Whether `config.STAGE.setting` names stages before this one that together judge all mechanisms but those that an
    annotate stage leaves out.

    Raises:
      ConfigError: it does not.
    """
    levelled: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        if name in run.before() and run.named(name).kind == "annotate":
            labels = run.settings(name, annotate.Settings)
            stages: Sequence[str] = labels.classifiers
            levelled += labels.left_out
        else:
            run.earlier(setting, name, tasks=attributes.JUDGE_TASKS)
            stages = [name]
        for stage in stages:
            levelled += attributes.judge_stage(run, stage).mechanisms
    annotate.check_coverage(levelled, f"config.{run.stage}.{setting}")


def find_judges(workdir: Path) -> list[Judge]:
    """The judges of a finished work directory: its identifiers, or its classifiers if it has none.

    Of several sets the first in the order of the run; WORKDIR/STAGE names another.

    Raises:
      ConfigError: no run is there, it trains no judge of some mechanism, or the stage is not finished.
    """
    run, chosen = _opened(workdir)
    names = [name for name in run.plan.stages if chosen in ("", name)]
    found: dict[str, list[str]] = {}
    for kind in ("identifier", "classifier"):
        covered: set[str] = set()
        for name in names:
            if attributes.judge_kind(run, name) == kind:
                mechanisms = set(attributes.judge_stage(run, name).mechanisms)
                if not mechanisms & covered:
                    covered |= mechanisms
                    found.setdefault(kind, []).append(name)
        if covered == set(MECHANISMS):
            return [_load_finished(run, name) for name in found[kind]]
    trained = "; ".join(f"{kind}s {', '.join(stages)}" for kind, stages in found.items()) or "none"
    raise ConfigError(f"{workdir} has no judges of {', '.join(MECHANISMS)} together; it trains: {trained}.")


def _opened(workdir: Path) -> tuple[RunContext, str]:
    """The run of a work directory; and the stage that WORKDIR/STAGE names, empty if none."""
    workdir = expand(workdir)
    root, chosen = (workdir, "") if (workdir / "config.json").is_file() else (workdir.parent, workdir.name)
    files = WorkDir(root)
    if not files.config.is_file():
        raise ConfigError(f"{workdir} holds no run; give the work directory of one that has trained identifiers.")
    return RunContext(files, read_plan(files), "evaluate"), chosen


def _load_finished(run: RunContext, stage: str) -> Judge:
    if not run.files.done(stage).exists():
        raise ConfigError(f"{run.files.root} has not finished its stage {stage} yet; run its recipe again.")
    try:
        return attributes.load_judge(run, stage)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


LINEAR = "linear"
"""Of `find_jury`: the linear judge alone. Also what its notes begin with."""


@dataclasses.dataclass(frozen=True)
class Jury:
    """All judges of a file of outputs.

    Attributes:
      neural: of a work directory; may be empty.
      linear: None where EPITOME is not there.
    """

    neural: Sequence[Judge] = ()
    linear: LinearJudge | None = None

    def __call__(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions, with what each judge says in their notes."""
        rows = judged(predictions, self.neural) if self.neural else list(predictions)
        if self.linear is None:
            return rows
        texts = {"response": [p.response for p in rows], "reference": [p.reference for p in rows]}
        levels = {whose: self.linear.levels(said) for whose, said in texts.items()}
        return with_notes(rows, {f"{LINEAR}_{whose}_attributes": found for whose, found in levels.items()})

    def about(self) -> dict[str, Any]:
        """The linear judge's quality on held-out posts by mechanism; or, under "absent", why there is none."""
        if self.linear is None:
            return {"absent": "EPITOME is not there to train it on"}
        return {name: dict(found) for name, found in self.linear.held_out.items()}


def linear_jury(data_dir: str) -> Jury:
    """The linear judge, trained on the EPITOME of `data_dir` (as `config.data.dir`); nobody where there is none."""
    try:
        jury = Jury(linear=load_linear(data_dir))
    except ConfigError as error:
        log.warning("no linear judge: %s", error)
        return Jury()
    for name, found in jury.about().items():
        log.info("linear judge, %s: weighted F1 %.1f, kappa %.2f", name, found["weighted_f1"], found["kappa"])
    return jury


def find_jury(where: str, data_dir: str = "") -> Jury:
    """The judges of a work directory and the linear one beside them.

    Args:
      where: as for `find_judges`; or "linear", for that judge alone.
      data_dir: where EPITOME is; empty = where the run has it, else EMPAX_DATA_DIR.

    Raises:
      ConfigError: see `find_judges`; or "linear" without EPITOME.
    """
    folder = expand(where)
    if where == LINEAR and not (folder / "config.json").is_file():
        return Jury(linear=load_linear(data_dir))
    neural = find_judges(folder)
    return dataclasses.replace(linear_jury(data_dir or _opened(folder)[0].plan.data.dir), neural=neural)


def judged(
    predictions: Sequence[Prediction], judges: Sequence[Judge], threshold: float = _THRESHOLD, *, prefix: str = ""
) -> list[Prediction]:
    """The predictions, with the levels of response and reference in notes named `prefix` + "..._attributes"."""
    contexts = [p.context for p in predictions]
    texts = {"response": [p.response for p in predictions], "reference": [p.reference for p in predictions]}
    levels = {whose: annotate.judge_levels(judges, contexts, said, threshold) for whose, said in texts.items()}
    return with_notes(predictions, {f"{prefix}{whose}_attributes": found for whose, found in levels.items()})
