"""Stage "assess": measures judges on held-out posts and writes classifiers.json."""

from __future__ import annotations

import dataclasses

from empax.core.config import ConfigError
from empax.core.files import write_json
from empax.core.system import RunContext
from empax.parts import attributes
from empax.pipeline import annotate


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      judges: stages that trained classifiers or identifiers of the mechanisms.
    """

    judges: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.judges:
            raise ConfigError("judges must name at least one stage that trains a judge.")


def check(settings: Settings, run: RunContext) -> None:
    """Raises ConfigError unless each judge is trained before."""
    for stage in settings.judges:
        run.earlier("judges", stage, tasks=attributes.JUDGE_TASKS)


def run(settings: Settings, run: RunContext) -> None:
    """Writes accuracy, weighted F1 and confusion of every mechanism, which reports show under "classifiers"."""
    judges = [attributes.load_judge(run, stage) for stage in settings.judges]
    write_json(run.directory / "classifiers.json", annotate.held_out_quality(settings.judges, run, judges))
