"""Trackers that receive a training stage's metrics: W&B, MLflow, trackio, all behind the same protocol.

Each stage is a separate run there, since its steps begin at 1. The work directory is its group (in MLflow, a tag), the
project is "empax". Each package's environment variables set the destination (a server, a folder, a file to be sent
later): WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR and others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from empax.core.config import ConfigError
from empax.core.files import read_json, write_json

log = logging.getLogger("empax")

_PROJECT = "empax"


@runtime_checkable
class Sink(Protocol):
    """A receiver of one stage's metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics after step `step`, by names such as "train/loss"; they may not be finite."""
        ...

    def close(self) -> None:
        """Sends any remaining data."""
        ...


class _Stage(NamedTuple):
    """A stage's folder, the settings of its training, and the ids of its runs, which a sink may extend."""

    directory: Path
    settings: Mapping[str, Any]
    ids: dict[str, str]

    @property
    def group(self) -> str:
        return self.directory.absolute().parent.name

    @property
    def name(self) -> str:
        return f"{self.group}/{self.directory.name}"


class _Run:
    """A run of wandb or trackio, which share an interface."""

    _run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Wandb(_Run):
    def __init__(self, stage: _Stage) -> None:
        import wandb  # type: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            group=stage.group,
            name=stage.name,
            id=stage.ids["id"],
            resume="allow",
            dir=str(_folder(stage.directory)),
            config=dict(stage.settings),
            settings=wandb.Settings(console="off"),  # it would take the terminal from the progress bar
        )


class _Mlflow:
    def __init__(self, stage: _Stage) -> None:
        import mlflow  # type: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # type: ignore[reportMissingImports]

        self._metric, self._client = Metric, mlflow.MlflowClient()
        if "mlflow" not in stage.ids:  # the server chooses it
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            tags = {"group": stage.group}
            self._id = self._client.create_run(experiment, run_name=stage.name, tags=tags).info.run_id
            self._client.log_batch(self._id, params=[Param(key, str(v)) for key, v in stage.settings.items()])
            stage.ids["mlflow"] = self._id
        self._id = stage.ids["mlflow"]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[self._metric(k, v, now, step) for k, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio(_Run):
    def __init__(self, stage: _Stage) -> None:
        import trackio  # type: ignore[reportMissingImports]

        self._run = trackio.init(
            project=_PROJECT,
            group=stage.group,
            name=f"{stage.name}-{stage.ids['id']}",  # trackio identifies a run by its name
            resume="allow",
            config=dict(stage.settings),
            embed=False,
        )


def _folder(directory: Path) -> Path:
    folder = directory / "sinks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_SINKS: dict[str, Callable[[_Stage], Sink]] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"config.sinks = {tuple(names)}: {name} is not installed; pip install 'empax[{name}]' brings it."
            )


def open_sinks(names: Sequence[str], directory: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """Starts a run with each tracker, or resumes the run of a stopped stage.

    A tracker that fails, now or later, is dropped with a warning and does not stop training. The stage's `directory`
    stores the ids of the runs in sinks/runs.json.
    """
    if not names:
        return []
    path = _folder(directory) / "runs.json"
    stage = _Stage(directory, settings, {"id": secrets.token_hex(4)})
    with contextlib.suppress(OSError, ValueError, TypeError):  # a new id works as well
        stage.ids.update(read_json(path))
    opened: list[Sink] = [_Guarded(name, stage) for name in names]
    write_json(path, stage.ids)
    return opened


class _Guarded:
    """A tracker that is ignored after its first error."""

    def __init__(self, name: str, stage: _Stage) -> None:
        self._name = name
        self._sink: Sink | None = self._tried(lambda: _SINKS[name](stage))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if (sink := self._sink) is not None:
            self._tried(lambda: sink.log(step, values))

    def close(self) -> None:
        if (sink := self._sink) is not None:
            self._tried(sink.close)

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # no error of a tracker may stop training
            self._sink = None
            log.warning("%s gets no more metrics of this stage (%s); they are in metrics.jsonl.", self._name, error)
            return None
