"""Removes stages whose training corpus is missing."""

from __future__ import annotations

import logging
from typing import Any

from empax.core.files import DataError, WorkDir
from empax.core.system import RunPlan
from empax.core.types import MECHANISMS
from empax.data import epitome
from empax.parts.attributes.pairs import IF_THERE, JudgeTaskSettings
from empax.pipeline.plan import changed_plan, read_plan

log = logging.getLogger("empax")


def leave_out_absent(plan: RunPlan, files: WorkDir, *, planned: bool = False) -> RunPlan:
    """Returns the plan in which each attribute classifier is either trained or listed in `left_out`.

    This decides the stages with `data = "if_there"` that an annotate stage names. With EPITOME, they are trained on it.
    Without it, they are removed, and `left_out` of the annotate stage lists their mechanisms. An existing work
    directory has already decided, so that a resumed run stays the same. In a plan that is only shown (`planned`), for
    devices elsewhere, the corpus may be there, too.
    """
    annotating = {name: stage.settings for name, stage in plan.stages.items() if stage.kind == "annotate"}
    wanted = dict.fromkeys(stage for settings in annotating.values() for stage in settings.classifiers)
    elsewhere = planned and bool(plan.options.plan.topology)
    undecided = {name: plan.stages[name].settings for name in wanted if _is_undecided(plan, name)}
    if not undecided:
        return plan
    gone = {name: one.mechanisms for name, one in undecided.items() if not _is_there(plan, files, name, elsewhere)}
    changes: dict[str, dict[str, Any]] = {name: {"data": None} for name in undecided if name not in gone}
    for name, settings in annotating.items():
        lost = {m for stage in settings.classifiers for m in gone.get(stage, ())}
        if lost:
            kept = [stage for stage in settings.classifiers if stage not in gone]
            left_out = [m for m in MECHANISMS if m in lost | set(settings.left_out)]
            changes[name] = {"classifiers": kept, "left_out": left_out}
    for name, mechanisms in gone.items():
        if not epitome.is_absent(plan.data.dir):
            log.warning(
                "%s stays left out, and so do its attributes %s: this run began without EPITOME, which is there now. A "
                "new --workdir includes them.",
                name, ", ".join(mechanisms),
            )  # fmt: skip
            continue
        log.warning(
            "%s is left out, and so are its attributes %s: EPITOME, their training data, is missing (put its files "
            "into config.data.dir). --config.%s.data=epitome requires it.",
            name, ", ".join(mechanisms), name,
        )  # fmt: skip
    return changed_plan(plan, changes, gone)


def _is_undecided(plan: RunPlan, name: str) -> bool:
    settings = plan.stages[name].settings if name in plan.stages else None
    return isinstance(settings, JudgeTaskSettings) and settings.data == IF_THERE


def _is_there(plan: RunPlan, files: WorkDir, name: str, elsewhere: bool) -> bool:
    """Whether the run contains the stage: according to its work directory or, for a new one, to the corpus."""
    try:
        return name in read_plan(files).stages
    except (FileNotFoundError, DataError):
        begun = files.stage(name).is_dir()  # config.json may be missing
    return begun or elsewhere or not epitome.is_absent(plan.data.dir)
