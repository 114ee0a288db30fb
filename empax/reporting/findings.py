"""Collects the inputs of a report from a work directory and from predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from empax.core.files import WorkDir, read_json
from empax.core.system import RunPlan
from empax.core.types import ATTRIBUTES, EMOTIONS, LEVELS, MECHANISMS, Prediction
from empax.evaluation.empathy import confusion_matrix


def of_stages(files: WorkDir, stages: Sequence[str], name: str) -> dict[str, Any]:
    """Reads the file `name` of each of `stages` that has one, in their order. Folders of other stages are not read."""
    paths = {stage: files.stage(stage) / name for stage in stages}
    return {stage: read_json(path) for stage, path in paths.items() if path.exists()}


def find_replies(files: WorkDir, stages: Sequence[str]) -> list[dict[str, Any]]:
    """Reads replies to the same contexts over training: `STAGE/replies/STEP.json` of each of `stages` that keeps them.

    Returns:
      `stage`, `context` (turns) and `replies` ((step, reply), in order) for each context.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for stage, path in ((s, p) for s in stages for p in sorted(files.stage(s).glob("replies/*.json"))):
        for number, row in enumerate(read_json(path)):
            entry = found.setdefault((stage, number), {"stage": stage, "context": row["context"], "replies": []})
            entry["replies"].append((int(path.stem), row["response"]))
    return list(found.values())


def count_instances(files: WorkDir, stages: Sequence[str]) -> dict[str, Any]:
    """Reads the counts of the stage `prepare` for every split, the hash of its input, and the source of facts."""
    path = files.stage("prepare") / "counts.json"
    counts = read_json(path) if path.exists() else {}
    return {**counts, **of_stages(files, stages, "knowledge.json")}


def find_classifiers(files: WorkDir, stages: Sequence[str]) -> dict[str, Any]:
    """Reads the quality of each mechanism's judge; that of a second stage's judge is under "STAGE/MECHANISM"."""
    found: dict[str, Any] = {}
    for stage, judges in of_stages(files, stages, "classifiers.json").items():
        found |= {f"{stage}/{name}" if name in found else name: quality for name, quality in judges.items()}
    return found


def retrieves(plan: RunPlan, stage: str) -> bool:
    """Whether the evaluate stage `stage` answers with exemplars."""
    answering = plan.stages.get(plan.stages[stage].settings.stage) if stage else None
    spec = answering.spec if answering else None
    return bool(answering and spec and spec.reads_exemplars(answering.settings))


def find_speed(history: Sequence[Mapping[str, Any]], stage_seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each training stage's median rate as "STAGE/examples_per_second", and each stage's seconds.

    Args:
      history: the logged steps. Their seconds continue after a resumption; those of a stage do not.
      stage_seconds: see `find_seconds`.

    Returns:
      Also "stages/seconds", the sum, if there are `stage_seconds`.
    """
    rates: dict[str, list[float]] = {}
    seconds = {f"{stage}/seconds": value for stage, value in stage_seconds.items()}
    for row in history:
        if row.get("split", "train") != "train":
            continue
        for name, value in row.items():
            if name.endswith("_per_second"):
                rates.setdefault(f"{row['stage']}/{name}", []).append(value)
            elif name == "seconds":  # cumulative
                key = f"{row['stage']}/seconds"
                seconds[key] = max(value, seconds.get(key, 0.0))
    if stage_seconds:
        seconds["stages/seconds"] = sum(seconds.values())
    return {**{name: statistics.median(values) for name, values in rates.items()}, **seconds}


def find_seconds(files: WorkDir, stages: Sequence[str]) -> dict[str, float]:
    """Returns the duration of each finished stage's last run."""
    return {stage: note["seconds"] for stage, note in of_stages(files, stages, "DONE").items() if "seconds" in note}


def find_peak_memory(files: WorkDir, stages: Sequence[str]) -> dict[str, float]:
    """Returns "stages/peak_memory_mb", the maximum over the processes that ran finished stages; empty if unknown."""
    notes = of_stages(files, stages, "DONE").values()
    held = [note["peak_memory_mb"] for note in notes if "peak_memory_mb" in note]
    return {"stages/peak_memory_mb": max(held)} if held else {}


def confusions(predictions: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """Returns the confusion matrices that the rows allow: emotion, attributes of exemplars, mechanisms of responses."""
    pairs: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
        "emotion": ("emotion of the dialogue", "predicted", [(r.emotion, r.emotion_prediction) for r in predictions])
    }
    for name in ATTRIBUTES:
        matched = [
            (row.attributes.get(name, ""), (exemplar.get("attributes") or {}).get(name, ""))
            for row in predictions
            for exemplar in row.exemplars
        ]
        pairs[f"{name} of exemplars"] = ("context", "its exemplars", matched)
    for name in MECHANISMS:
        levels = [
            (row.level("reference_attributes", name), row.level("response_attributes", name)) for row in predictions
        ]
        pairs[f"{name} of responses"] = ("reference", "response", levels)
    found = {}
    for title, (row_title, column_title, values) in pairs.items():
        known = [(label, guess) for label, guess in values if label and guess]
        if not known:
            continue
        labels, guesses = [label for label, _ in known], [guess for _, guess in known]
        usual = EMOTIONS if title == "emotion" else LEVELS
        names = [*usual, *sorted({*labels, *guesses} - set(usual))]
        matrix = confusion_matrix(labels, guesses, names).tolist()
        found[title] = {"labels": names, "matrix": matrix, "rows": row_title, "columns": column_title}
    return found
