"""Who judges responses for their empathy: the classifiers or identifiers of this run, or those of another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from empax.core.config import ConfigError, to_settings
from empax.core.files import WorkDir
from empax.core.manifest import read_config
from empax.core.run import RunContext
from empax.core.types import MECHANISMS, Prediction
from empax.pipeline import annotate
from empax.systems import attributes
from empax.systems.attributes import Judge
from empax.training.checkpoint import CheckpointError

_THRESHOLD = annotate.Settings.sentiment_threshold


def load_judges(names: str | Sequence[str], context: RunContext) -> tuple[list[Judge], float]:
    """The judges of the named stages of this run, and the threshold of VADER beside them.

    Args:
      names: annotate stages, whose classifiers are meant, or training stages of judges.
      context: the run.

    Raises:
      ConfigError: a stage that is neither, or a mechanism without a judge.
    """
    judges: list[Judge] = []
    threshold = _THRESHOLD
    for name in [names] if isinstance(names, str) else names:
        section = context.section(name)
        if section["kind"] == "annotate":
            labels = to_settings(annotate.Settings, section, where=f"config.{name}")
            judges += annotate.load_judges(labels, context)
            threshold = labels.sentiment_threshold
        else:
            judges.append(attributes.load_judge(context, name))
    annotate.check_coverage(judges, f"config.{context.stage}.judge")
    return judges, threshold


def find_judges(workdir: Path) -> list[Judge]:
    """The judges of a finished work directory: its identifiers, or its classifiers if it has none.

    Of several sets the first in the order of the run; WORKDIR/STAGE names another.

    Raises:
      ConfigError: no run is there, it trains no judge of some mechanism, or the stage is not finished.
    """
    root, chosen = (workdir, "") if (workdir / "config.json").is_file() else (workdir.parent, workdir.name)
    files = WorkDir(root)
    if not files.config.is_file():
        raise ConfigError(f"{workdir} holds no run; give the --workdir of one that has trained empathy identifiers.")
    run = RunContext(files, read_config(files), "evaluate")
    names = [name for name in run.config["run"] if chosen in ("", name)]
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


def _load_finished(run: RunContext, stage: str) -> Judge:
    if not run.files.done(stage).exists():
        raise ConfigError(f"{run.files.root} has not finished its stage {stage} yet; run its recipe again.")
    try:
        return attributes.load_judge(run, stage)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def judged(
    predictions: Sequence[Prediction], judges: Sequence[Judge], threshold: float = _THRESHOLD, *, prefix: str = ""
) -> list[Prediction]:
    """The predictions, with the levels of response and reference in notes named `prefix` + "..._attributes"."""
    contexts = [p.context for p in predictions]
    levels = {
        f"{prefix}{whose}_attributes": annotate.judge_levels(judges, contexts, texts, threshold)
        for whose, texts in (
            ("response", [p.response for p in predictions]),
            ("reference", [p.reference for p in predictions]),
        )
    }
    return [
        dataclasses.replace(p, notes={**p.notes, **{note: rows[i] for note, rows in levels.items()}})
        for i, p in enumerate(predictions)
    ]
