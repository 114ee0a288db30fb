"""Settings and work folder of `TextModel.finetune`; errors use the names of its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from empax.core.config import ConfigError, check_numbers, to_settings
from empax.core.files import WorkDir, read_json, system_errors, write_json
from empax.core.lock import writing
from empax.core.paths import given_folder
from empax.core.protocols import Examples
from empax.core.sharding import batch_shards, make_mesh
from empax.models.lora import LoraSettings
from empax.serving.pairs import buckets_of
from empax.training.accumulation import NonFiniteError
from empax.training.interruption import Interrupted
from empax.training.optimizer import OptimizerSettings
from empax.training.settings import LoopSettings


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """See `TextModel.finetune`.

    Attributes:
      learning_rate: None = 1e-3 for adapters, 1e-4 for all weights.
    """

    epochs: int
    batch_size: int
    learning_rate: float | None
    max_source_tokens: int
    max_target_tokens: int
    seed: int

    def __post_init__(self) -> None:
        check_numbers(self, "epochs", "batch_size", least=1)
        check_numbers(self, "max_source_tokens", "max_target_tokens", least=2)
        check_numbers(self, "learning_rate", "seed", least=0)
        shards = batch_shards(make_mesh())
        if self.batch_size % shards:
            raise ConfigError(f"batch_size = {self.batch_size} must be a multiple of {shards}, the number of devices.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FinetuneSettings:
        """Builds settings from `values`; raises ConfigError for a value of the wrong type or out of range."""
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
        return to_settings(cls, plain, where="finetune")

    @property
    def lengths(self) -> dict[str, int]:
        """Fields of `data.sources.LayoutSettings`."""
        return {"max_context_tokens": self.max_source_tokens, "max_target_tokens": self.max_target_tokens}

    def loop(
        self, train: Examples, validation: Examples | None, *, adapters: bool, most_tokens: int | None
    ) -> LoopSettings:
        """Returns the settings of the training loop; with `validation` the best epoch is kept, else the last.

        `most_tokens`: the maximum length of a source; None = unlimited.
        """
        updates = -(-len(train) // self.batch_size)
        default = 1e-3 if adapters else 1e-4
        return LoopSettings(
            steps=self.epochs * updates,
            batch_size=self.batch_size,
            buckets=buckets_of(*filter(None, (train, validation)), most=most_tokens),
            seed=self.seed,
            log_every_steps=max(updates // 4, 1),
            eval_every_steps=updates,
            checkpoint_every_steps=updates,
            best_metric=None if validation is None else "nll",
            optimizer=OptimizerSettings(
                learning_rate=default if self.learning_rate is None else self.learning_rate,
                schedule="linear",
                warmup_steps=min(self.epochs * updates // 10, 100),
            ),
        )


def lora_settings(lora: LoraSettings | int | bool, *, width: int) -> LoraSettings | None:
    """Converts the argument `lora` to the settings of adapters, on all linear layers for a rank; None = no adapters.

    `width` is d_model: adapters of that rank can express any update.

    Raises:
      ConfigError: the rank or the type of the argument is invalid.
    """
    if lora is False:
        return None
    lora = 8 if lora is True else lora
    if isinstance(lora, LoraSettings):
        return lora
    lora = lora.item() if isinstance(lora, np.integer) else lora
    if not isinstance(lora, int) or lora < 1:
        raise ConfigError(
            f"lora = {lora!r} must be True, False, a rank (a whole number of at least 1) or empax's LoraSettings."
        )
    if lora > width:
        raise ConfigError(f"lora = {lora} is more than {width}, the width of the model; take a lower rank.")
    return LoraSettings(rank=lora, alpha=2.0 * lora)


@contextlib.contextmanager
def working_folder(workdir: Path | str | None, inputs: str, *, learning_rate: float) -> Iterator[Path]:
    """Yields the folder of one fine-tuning, a temporary one without `workdir`; adds advice to early ends.

    `inputs` is a hash of everything that the result depends on. If training diverges, the error names `learning_rate`.

    Raises:
      ConfigError: `workdir` is not a path, is not writable, or holds a fine-tuning on other pairs, weights or settings.
      DataError: the system refuses to write to it.
      Interrupted, NonFiniteError: re-raised from the body, with advice for the caller.
    """
    try:
        own = None if workdir is None else given_folder(workdir, "workdir")
        with tempfile.TemporaryDirectory() if own is None else contextlib.nullcontext(own) as place:
            folder = Path(place)
            with system_errors(folder, "written"):
                folder.mkdir(parents=True, exist_ok=True)
            with writing(WorkDir(folder), "workdir"):
                _check_same(folder, inputs)
                yield folder
    except NonFiniteError as error:
        advice = f"Lower learning_rate = {learning_rate:g}"
        advice += "; nothing was kept." if workdir is None else ", and name another workdir for it."
        raise NonFiniteError(f"{error.__cause__ or error}. {advice}") from error
    except Interrupted as interrupted:
        if workdir is not None:
            raise
        raise Interrupted(
            f"finetune: stopped after step {interrupted.step}; nothing was kept, since there is no workdir: with "
            "finetune(..., workdir=FOLDER) the same call continues from there.",
            step=interrupted.step,
        ) from interrupted


def _check_same(folder: Path, inputs: str) -> None:
    file = folder / "inputs.json"
    if not file.exists():
        write_json(file, {"hash": inputs})
    elif read_json(file) != {"hash": inputs}:
        raise ConfigError(
            f"workdir = {folder} holds a fine-tuning on other pairs, weights or settings; name another folder."
        )
