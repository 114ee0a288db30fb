"""Judges of the empathy of responses: the classifiers or identifiers of this run or of another one."""

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
from empax.data import epitome
from empax.evaluation.rows import with_notes
from empax.parts import attributes
from empax.parts.attributes import Judge
from empax.parts.attributes.linear import LinearJudge, load_linear
from empax.parts.attributes.published import NAME as PUBLISHED
from empax.parts.attributes.published import load_published
from empax.pipeline import annotate
from empax.pipeline.plan import read_plan
from empax.training.checkpoint import CheckpointError

log = logging.getLogger("empax")


def load_judges(names: str | Sequence[str], run: RunContext) -> list[Judge]:
    """Loads the judges of stages that passed `check_judges`.

    An annotate stage stands for its classifiers; the other stages train judges.

    Raises:
      ConfigError: a stage is neither.
    """
    judges: list[Judge] = []
    for name in [names] if isinstance(names, str) else names:
        if run.named(name).kind == "annotate":
            judges += annotate.load_judges(run.settings(name, annotate.Settings), run)
        else:
            judges.append(attributes.load_judge(run, name))
    return judges


def check_judges(setting: str, names: str | Sequence[str], run: RunContext) -> None:
    """Checks that the earlier stages in `config.STAGE.setting` judge all mechanisms that no annotate stage leaves out.

    Raises:
      ConfigError: they do not.
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
    """Loads the judges of a finished work directory: its identifiers, or its classifiers if it has none.

    Of several sets, loads the smallest, and of these the first in the order of the run; WORKDIR/STAGE selects another.

    Raises:
      ConfigError: there is no run, it trains no judge of some mechanism, or the stage is not finished.
    """
    run, chosen = _opened(workdir)
    names = [name for name in run.plan.stages if chosen in ("", name)]
    kinds = {name: attributes.judge_kind(run, name) for name in names}
    trains = {name: attributes.judge_stage(run, name).mechanisms for name, kind in kinds.items() if kind}
    found: list[str] = []
    for kind in ("identifier", "classifier"):
        stages = [name for name in trains if kinds[name] == kind]
        for group in (group for size in (1, 2, 3) for group in itertools.combinations(stages, size)):
            if sorted(mechanism for name in group for mechanism in trains[name]) == sorted(MECHANISMS):
                return [_load_finished(run, name) for name in group]
        found += [f"{kind}s {', '.join(stages)}"] * bool(stages)
    trained = "; ".join(found) or "none"
    raise ConfigError(f"{workdir} has no judges that cover {', '.join(MECHANISMS)}; it trains: {trained}.")


def _opened(workdir: Path) -> tuple[RunContext, str]:
    """Returns the run of a work directory, and the stage of WORKDIR/STAGE, empty if none."""
    workdir = expand(workdir)
    root, chosen = (workdir, "") if (workdir / "config.json").is_file() else (workdir.parent, workdir.name)
    files = WorkDir(root)
    if not files.config.is_file():
        raise ConfigError(f"{workdir} holds no run; give the work directory of one that has trained identifiers.")
    plan = read_plan(files)
    if chosen and chosen not in plan.stages:
        raise ConfigError(f"the run in {root} has no stage {chosen!r}; it has: {', '.join(plan.stages)}.")
    return RunContext(files, plan, "evaluate"), chosen


def _load_finished(run: RunContext, stage: str) -> Judge:
    if not run.files.done(stage).exists():
        raise ConfigError(f"{run.files.root} has not finished stage {stage} yet; run its recipe again.")
    try:
        return attributes.load_judge(run, stage)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


LINEAR = "linear"
"""The linear judge alone, for `find_jury`. Also the prefix of its notes."""

ALONE = (LINEAR, PUBLISHED)
"""Judges for `find_jury` that need no run."""


@dataclasses.dataclass(frozen=True)
class Jury:
    """All judges of a file of predictions.

    Attributes:
      neural: judges of a work directory; may be empty.
      linear: the linear judge; None without EPITOME.
    """

    neural: Sequence[Judge] = ()
    linear: LinearJudge | None = None

    def __call__(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Adds the labels of each judge to the notes of the predictions."""
        rows = judged(predictions, self.neural) if self.neural else list(predictions)
        if self.linear is None:
            return rows
        texts = {"response": [p.response for p in rows], "reference": [p.reference for p in rows]}
        levels = {whose: self.linear.levels(said) for whose, said in texts.items()}
        return with_notes(rows, {f"{LINEAR}_{whose}_attributes": found for whose, found in levels.items()})

    def about(self) -> dict[str, Any]:
        """Returns the linear judge's quality on held-out posts by mechanism; or, under "absent", why there is none."""
        if self.linear is None:
            return {"absent": "EPITOME is not there to train it on"}
        return {name: dict(found) for name, found in self.linear.held_out.items()}


def check_linear(data_dir: str) -> None:
    """Checks the EPITOME in `data_dir` (as `config.data.dir`); without it there is no linear judge.

    Raises:
      ConfigError: some of its files are missing.
      DataError: one is damaged.
    """
    if not epitome.is_absent(data_dir):
        epitome.load_epitome(epitome.find_epitome(data_dir))


def linear_jury(data_dir: str) -> Jury:
    """Trains the linear judge on the EPITOME in `data_dir` (as `config.data.dir`); empty jury without it."""
    try:
        jury = Jury(linear=load_linear(data_dir))
    except ConfigError as error:
        log.warning("no linear judge: %s", error)
        return Jury()
    for name, found in jury.about().items():
        log.info("linear judge, %s: weighted F1 %.1f, kappa %.2f", name, found["weighted_f1"], found["kappa"])
    return jury


def find_jury(where: str, data_dir: str = "") -> Jury:
    """Loads the judges of a work directory and the linear judge.

    Args:
      where: as in `find_judges`; "empathy-minilm" for the published judge, or "linear" for the linear judge alone.
      data_dir: folder of EPITOME; if it holds none, that of the run, else EMPAX_DATA_DIR.

    Raises:
      ConfigError: see `find_judges` and `load_published`; or "linear" without EPITOME.
    """
    folder = expand(where)
    if where in ALONE and not (folder / "config.json").is_file():
        if where == LINEAR:
            return Jury(linear=load_linear(data_dir, setting="--data"))
        return Jury([load_published()], None if epitome.is_absent(data_dir) else load_linear(data_dir))
    neural = find_judges(folder)
    given = "" if epitome.is_absent(data_dir) else data_dir  # it may hold EmpatheticDialogues alone
    return dataclasses.replace(linear_jury(given or _opened(folder)[0].plan.data.dir), neural=neural)


def judged(predictions: Sequence[Prediction], judges: Sequence[Judge], *, prefix: str = "") -> list[Prediction]:
    """Adds the levels of responses and references to the predictions, in notes named `prefix` + "..._attributes"."""
    contexts = [p.context for p in predictions]
    texts = {"response": [p.response for p in predictions], "reference": [p.reference for p in predictions]}
    levels = {whose: annotate.judge_levels(judges, contexts, said) for whose, said in texts.items()}
    return with_notes(predictions, {f"{prefix}{whose}_attributes": found for whose, found in levels.items()})
