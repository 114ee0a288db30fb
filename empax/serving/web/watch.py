"""Watching a run while it trains: curves, changing replies, time left, memory; read-only."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from empax.core.config import ConfigError, UserError
from empax.core.files import WorkDir, message_of, metric_rows, read_json
from empax.core.lock import holder
from empax.core.progress import duration
from empax.core.system import AnswerOptions, RunContext, RunPlan, Stage
from empax.data.store import load_instances
from empax.pipeline import evaluate
from empax.pipeline.plan import read_plan
from empax.reporting.charts import line_chart
from empax.reporting.report import collect_curves
from empax.serving.web.gate import LOG, place_of
from empax.training.checkpoint import newest_best

_SHOWN = ("loss", "nll", "perplexity", "emotion_accuracy", "reward", "learning_rate")
"""Curves that are shown first."""


_KEPT = 4
"""Number of checkpoints whose replies are shown."""


class Said(NamedTuple):
    """Replies of a stage's best parameters at a step, each with the turn that it answers."""

    stage: str
    step: int
    replies: tuple[tuple[str, str], ...]


class Replies:
    """Replies of a run in training: `look` generates them in a separate thread when there are new best parameters.

    `count` is the number of contexts of the validation split to answer; 0 = none.
    """

    def __init__(self, workdir: Path, count: int):
        self._files, self._count = WorkDir(workdir), count
        self._pool, self._answering = ThreadPoolExecutor(1, "replies"), None
        self._tried: tuple[str, int] | None = None
        self.said, self.failed = collections.deque[Said](maxlen=_KEPT), ""

    def look(self, stages: Sequence[str]) -> None:
        """Answers with the best parameters of the newest of `stages` that can answer, unless already tried."""
        if not self._count or (self._answering is not None and not self._answering.done()):
            return
        try:
            plan = read_plan(self._files)
        except UserError as error:
            self.failed = message_of(error)
            return
        named = [plan.stages[stage] for stage in stages if stage in plan.stages]
        able = [stage for stage in named if stage.spec is not None and stage.spec.answer is not None]
        step = newest_best(self._files.stage(able[-1].name)) if able else None
        if step is not None and self._tried != (able[-1].name, step):
            self._tried = able[-1].name, step
            self._answering = self._pool.submit(self._answer, plan, able[-1], step)

    def _answer(self, plan: RunPlan, stage: Stage, step: int) -> None:
        try:
            assert stage.spec is not None
            assert stage.spec.answer is not None
            evaluated, run = evaluate.main_stage(plan), RunContext(self._files, plan, stage.name)
            index = run.settings(evaluated, evaluate.Settings).index if evaluated else ""
            answerer = stage.spec.answer(stage.settings, run, AnswerOptions(stage.name, index))
            contexts = load_instances(run, "validation")[: self._count]
            found = answerer.respond(contexts, batch_size=1, seed=plan.seed)
        except (UserError, OSError) as error:
            self.failed = message_of(error)
            return
        except Exception as error:  # log it here, since nobody reads the thread's future
            LOG.error("%s in %s", type(error).__name__, place_of(error))
            self.failed = f"{type(error).__name__}: {message_of(error):.300}"
            return
        self.failed = ""
        self.said.append(Said(stage.name, step, tuple((row.context[-1], row.response) for row in found)))


def check_run(workdir: Path) -> None:
    """Raises ConfigError if there is no run, finished or not."""
    if not WorkDir(workdir).config.exists():
        raise ConfigError(f"{workdir} holds no run; give the work directory of one that has begun.")


def watch_page(workdir: Path, replies: Replies) -> str:
    """Builds the page from the run's current files; it reloads every ten seconds."""
    files = WorkDir(workdir)
    config, rows = read_json(files.config), [row for _, row in metric_rows(files.metrics)]
    running, stages = holder(files), list(dict.fromkeys(row["stage"] for row in rows))
    under_way = next((name for name in config["run"] if not files.done(name).exists()), "")
    progress = left(config, rows, under_way) if under_way else "It has finished; report.html in its folder says how."
    replies.look(stages)
    curves: Mapping[str, Any] = collect_curves(rows)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("empax.serving.web", ""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    return templates.get_template("watch.html").render(
        name=workdir.name,
        running=running or "It is not running now.",
        lines=(progress, memory()),
        failed=replies.failed,
        said=tuple(replies.said)[::-1],  # a copy: the thread may append to it
        charts={stage: _charts(curves[stage]) for stage in reversed(stages)},
    )


def _charts(curves: Mapping[str, Any]) -> list[str]:
    names = sorted(curves, key=lambda name: (_SHOWN.index(name) if name in _SHOWN else len(_SHOWN), name))
    return [line_chart(curves[name], x_label="step", y_label=name) for name in names if name != "seconds"]


def left(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], stage: str) -> str:
    """Returns a line on the current stage's progress and its remaining time at the speed so far."""
    logged = (row for row in reversed(rows) if row["stage"] == stage and row.get("split") == "train")
    row = next((row for row in logged if "seconds" in row), None)
    if row is None:
        return f"{stage} is under way; it has logged no step yet."
    section = config.get(row["stage"]) or {}
    steps = section.get("steps")
    if not steps or not row["step"]:
        return f"{row['stage']}: step {row['step']}."
    seconds = row["seconds"] / row["step"] * max(steps - row["step"], 0)
    # Patience or a small user corpus ends a stage sooner.
    most = "at most " * bool(section.get("patience") or config.get("data", {}).get("name") == "jsonl")
    about = most or "about "
    return f"{row['stage']}: step {row['step']} of {most}{steps}, {about}{duration(seconds)} left in this stage."


def memory() -> str:
    """Returns a line on the memory that the machine uses; empty if unknown."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return ""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in path.read_text().splitlines() if ":" in line}
    total, free = kib.get("MemTotal", 0) / 2**20, kib.get("MemAvailable", 0) / 2**20
    return f"Memory of this machine: {total - free:.1f} of {total:.1f} GiB are in use."
