"""Checkpoints of a stage, written in the background by Orbax; incomplete ones do not count.

`STAGE/checkpoints/STEP/` holds `params` and `rest` (optimizer state, step, PRNG key), `STAGE/best/STEP/` holds
`params`. So does `STAGE/kept/STEP/`, which stays. A checkpoint counts once its `COMPLETE` file exists. It is written
last and holds the CRC-32 of every other file and its own checksum, so checkpoints of killed processes are skipped and
damaged files are detected.
"""

from __future__ import annotations

import logging
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from empax.core import distributed
from empax.core.config import UserError
from empax.core.files import DataError
from empax.core.manifest import read_sealed, remedy, verify, write_sealed
from empax.core.tree import named_leaves
from empax.core.types import Params, TrainState

log = logging.getLogger("empax")

RESULT = "result.json"
"""A stage's metrics after training, in its folder, including the step of the best parameters."""

_COMPLETE = "COMPLETE"
_FOLDERS = {"last": "checkpoints", "best": "best", "kept": "kept"}
_DAMAGE = (OSError, ValueError, KeyError)  # errors from reading a missing, truncated or changed file
_KEPT = 2  # number of recent checkpoints: one, and a fallback
_MEETING_SECONDS = 3600
_SAVE_ERRORS = (OSError, ValueError)  # tensorstore has no error class for a full or failing disk


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or read; the message names it and the intact ones."""


class Checkpointer:
    """Saves and restores the training state of one stage, in its folder. Saves run in the background, one at a time.

    Raises:
      CheckpointError: from any method, if the previous save failed (such as on a full disk). Earlier complete
        checkpoints are untouched.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._last, self._best, self._kept = (self._directory / name for name in _FOLDERS.values())
        self._orbax = ocp.AsyncCheckpointer(_handler())
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: tuple[Path, Future[None]] | None = None
        if distributed.is_writer():
            for folder in (self._last, self._best, self._kept):
                _remove_unfinished(folder)

    def save(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> None:
        """Starts saving `state` and returns; `extra` is the loop's other state, as JSON.

        The state may be donated to the next step at once. Call this after any `save_best` of the same step.
        """
        rest = _rest(state, jax.random.key_data(state.rng))
        items = {"params": ocp.args.PyTreeSave(state.params), "rest": ocp.args.PyTreeSave(rest)}
        record = {"extra": dict(extra), "leaves": _signature(params=state.params, rest=rest)}
        self._start(self._last / str(step), items, record)

    def save_best(self, step: int, params: Params, value: float | None) -> None:
        """Starts saving the best parameters so far and returns; `value` is their metric, None without an evaluation."""
        self._start(self._best / str(step), {"params": ocp.args.PyTreeSave(params)}, {"value": value})

    def keep(self, step: int, params: Params) -> None:
        """Starts saving parameters for good and returns."""
        self._start(self._kept / str(step), {"params": ocp.args.PyTreeSave(params)}, {})

    def wait(self) -> bool:
        """Blocks until everything is on disk; returns whether a save was pending."""
        if self._pending is None:
            return False
        (path, future), self._pending = self._pending, None
        try:
            future.result()
        except _SAVE_ERRORS as error:
            shutil.rmtree(path, ignore_errors=True)
            # Frees the space; unfinished writes of Orbax may leave files for the next start to remove.
            _remove_unfinished(path.parent)
            steps = ", ".join(map(str, _complete(self._last)))
            intact = f"intact: the checkpoints of steps {steps}" if steps else "there is no earlier one"
            message = f"saving {path} failed ({type(error).__name__}: {error}); {intact}. Make room and run again."
            log.error("%s", message)
            raise CheckpointError(message) from error
        return True

    def check(self) -> None:
        """Raises the error of a finished background save; does not block."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def restore_latest(self, template: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
        """Restores the newest undamaged checkpoint as (step, state, extra); returns None without one.

        Skips, with a warning, a damaged checkpoint and one with damaged best parameters. Removes best and kept
        parameters saved after the restored step: the run will reach them again.

        Args:
          template: arrays or shapes with shardings, which define the arrays to create and their placement.

        Raises:
          CheckpointError: the checkpoint is sound but from another model or optimizer, or all sound checkpoints depend
            on damaged best parameters.
        """
        self.wait()
        problem = ""
        for step, path in reversed(_complete(self._last).items()):
            try:
                record = _verified(path)
            except _DAMAGE as error:
                log.warning("%s is damaged (%s); falling back to the previous checkpoint.", path, error)
                continue
            if problem := self._best_problem(step, record["best"]):
                log.warning("%s; %s builds on it. Falling back to the checkpoint before that.", problem, path)
                continue
            state = self._restore(path, record, template)
            log.info("Continuing from the checkpoint %s.", path)
            self._forget(after=step)
            return step, state, record["extra"]
        if problem:
            raise CheckpointError(f"{problem}, and there is no older checkpoint. {remedy(self._directory.name)}")
        if self._last.is_dir() and any(self._last.iterdir()):
            log.warning("%s holds no complete, undamaged checkpoint; training starts anew.", self._last)
        self._forget(after=-1)
        return None

    def close(self) -> None:
        """Waits for the last save and stops the background threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _start(self, path: Path, items: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        self.wait()
        try:
            if distributed.is_writer():
                shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
            self._orbax.save(path, args=ocp.args.Composite(**items))
        except _SAVE_ERRORS as error:
            future: Future[None] = Future()
            future.set_exception(error)
        else:
            future = self._thread.submit(self._finish, path, record)
        self._pending = (path, future)
        self.check()

    def _finish(self, path: Path, record: Mapping[str, Any]) -> None:
        self._orbax.wait_until_finished()
        if not distributed.is_writer():
            return
        if path.parent == self._last:  # `save_best` of the same step came first
            found = [step for step in _complete(self._best) if step <= int(path.name)]
            record = {**record, "best": max(found, default=None)}
        write_sealed(path / _COMPLETE, {**record, "checksums": _checksums(path)})
        if path.parent == self._last:
            self._drop_others(int(path.name))
            self._drop_old_best()

    def _drop_others(self, newest: int) -> None:
        """Keeps the last checkpoints up to step `newest`; a run that reaches it has refused all later ones."""
        found = _complete(self._last)
        kept = [step for step in found if step <= newest][-_KEPT:]
        for step, path in found.items():
            if step not in kept:
                _remove(path)

    def _best_problem(self, step: int, best: int | None) -> str:
        """Describes the damage to the best parameters (of step `best`) until `step`; empty without any."""
        if best is None:
            return ""
        path = self._best / str(best)
        try:
            _verified(path)
        except _DAMAGE as error:
            return f"{path}, the best parameters up to step {step}, is damaged ({error})"
        return ""

    def _drop_old_best(self) -> None:
        """Keeps the best parameters as of the oldest checkpoint and all later ones, which a resumed run may need."""
        oldest = min(_complete(self._last))
        best = [path for step, path in _complete(self._best).items() if step <= oldest]
        for path in best[:-1]:
            _remove(path)

    def _forget(self, *, after: int) -> None:
        if not distributed.is_writer():
            return
        for folder in (self._best, self._kept):
            for step, path in _complete(folder).items():
                if step > after:
                    _remove(path)

    def _restore(self, path: Path, record: Mapping[str, Any], template: TrainState) -> TrainState:
        rng = jax.eval_shape(jax.random.key_data, template.rng)
        rest = _rest(template, jax.ShapeDtypeStruct(rng.shape, rng.dtype, sharding=_sharding(template.step)))
        _check_signature(path, record["leaves"], _signature(params=template.params, rest=rest))
        made = self._orbax.restore(
            path,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeRestore(template.params, restore_args=_restore_args(template.params)),
                rest=ocp.args.PyTreeRestore(rest, restore_args=_restore_args(rest)),
            ),
        )
        found = made["rest"]
        return TrainState(
            step=found["step"],
            params=made["params"],
            opt_state=_like(template.opt_state, found["opt_state"]),
            rng=jax.random.wrap_key_data(found["rng"], impl=_key_impl(template.rng)),
            memory=_like(template.memory, found.get("memory", {})),
        )


def meet(name: str) -> None:
    """Returns once every process has called it; each call needs a unique name.

    It is not a collective: those of CPUs fail if a process is half a minute late.
    """
    everyone = set(range(jax.process_count()))
    ocp.multihost.sync_global_processes(f"empax/{name}", timeout=_MEETING_SECONDS, processes=everyone)


def load_params(directory: Path, which: Literal["best", "last"] | int = "best") -> Params:
    """Loads parameters of the stage in `directory` as numpy arrays: the best by validation, the last, or those kept.

    This needs no model. A number is the step of kept parameters.

    Raises:
      CheckpointError: the stage has not been trained, its output is damaged, or nothing was kept at that step. For a
        finished stage, only the final step's "best" and "last" are accepted.
    """
    path = _trained(directory.absolute(), which)
    try:
        _verified(path)
        verify(path)
    except _DAMAGE as error:
        raise CheckpointError(f"{path} is damaged ({error}). {remedy(directory.name)}") from error
    # On its own: one process may read files that others do not, and Orbax would make it wait for them.
    alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()})
    with ocp.Checkpointer(_handler(), multiprocessing_options=alone) as orbax:
        tree = orbax.metadata(path).item_metadata["params"].tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = orbax.restore(path, args=ocp.args.Composite(params=ocp.args.PyTreeRestore(restore_args=args)))
    return restored["params"]


def newest_best(directory: Path) -> int | None:
    """Returns the step of the parameters that `load_params` would load from an unfinished stage; None without any."""
    return max(_complete(directory / _FOLDERS["best"]), default=None)


def _trained(directory: Path, which: Literal["best", "last"] | int) -> Path:
    """Returns the checkpoint of a stage: the newest one, the one that its result names, or the kept one of a step."""
    folder = directory / _FOLDERS["kept" if isinstance(which, int) else which]
    found = _complete(folder)
    if isinstance(which, int):
        if which not in found:
            steps = ", ".join(map(str, found)) or "no step"
            raise CheckpointError(f"{folder} holds no parameters of step {which}; it holds those of {steps}.")
        return found[which]
    ended = directory / RESULT
    if (directory / "DONE").exists() and not ended.exists():
        raise CheckpointError(f"{ended} is gone. {remedy(directory.name)}")
    if not ended.exists():
        if not found:
            raise CheckpointError(f"{folder} holds no complete checkpoint; run the stage {directory.name!r} first.")
        return found[max(found)]
    try:
        step = read_sealed(ended)["best_step" if which == "best" else "step"]
    except DataError as error:
        raise CheckpointError(f"{error} {remedy(directory.name)}") from error
    if step not in found:
        raise CheckpointError(
            f"{folder / str(step)}, which {ended.name} names, is gone or incomplete. {remedy(directory.name)}"
        )
    return found[step]


def _handler() -> ocp.CompositeCheckpointHandler:
    return ocp.CompositeCheckpointHandler(params=ocp.PyTreeCheckpointHandler(), rest=ocp.PyTreeCheckpointHandler())


def _complete(folder: Path) -> dict[int, Path]:
    """Returns the complete checkpoints by step, oldest first."""
    paths = [path for path in folder.glob("*") if path.name.isdecimal() and (path / _COMPLETE).exists()]
    return {int(path.name): path for path in sorted(paths, key=lambda path: int(path.name))}


def _remove(path: Path) -> None:
    """Deletes a checkpoint; its mark goes first, so that a partly deleted one does not count."""
    (path / _COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Deletes the remains of a killed process or a failed save."""
    for path in list(folder.glob("*")):
        if not (path / _COMPLETE).exists():
            log.warning("%s was never finished; removing it.", path)
            shutil.rmtree(path, ignore_errors=True)


def _checksums(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): _crc32(file) for file in sorted(path.rglob("*")) if file.is_file()}


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _numbered(tree: Any) -> dict[str, Any]:
    """Returns leaves by number: an optimizer state is not a nested dict; `_like` restores its structure."""
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _like(template: Any, numbered: Mapping[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(template), [numbered[str(i)] for i in range(len(numbered))])


def _rest(state: TrainState, rng: Any) -> dict[str, Any]:
    """Returns the state saved beside the parameters, without an empty memory: Orbax does not restore empty trees."""
    memory = _numbered(state.memory)
    kept = {"step": state.step, "rng": rng, "opt_state": _numbered(state.opt_state)}
    return {**kept, "memory": memory} if memory else kept


def _verified(path: Path) -> dict[str, Any]:
    """Returns the record of a checkpoint with intact files; otherwise raises ValueError or OSError."""
    record = read_sealed(path / _COMPLETE)
    for name, expected in record["checksums"].items():
        if _crc32(path / name) != expected:
            raise ValueError(f"{name} has changed since it was written: its checksum differs")
    return record


def _signature(**trees: Any) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(trees).items()}


def _check_signature(path: Path, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    if found == wanted:
        return
    name = next(name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name))
    raise CheckpointError(
        f"{path} was made by another model or optimizer: {name} is {found.get(name, 'absent')} in it, "
        f"{wanted.get(name, 'absent')} now. Restore the settings, or use another workdir."
    )


def _sharding(leaf: Any) -> Any:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _restore_args(tree: Any) -> Any:
    def args(leaf: Any) -> ocp.ArrayRestoreArgs:
        return ocp.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=leaf.shape, dtype=leaf.dtype)

    return jax.tree.map(args, tree)


def _key_impl(rng: Any) -> Any:
    """Returns the implementation of a typed PRNG key, or of its shape."""
    return rng.dtype._impl if isinstance(rng, jax.ShapeDtypeStruct) else jax.random.key_impl(rng)
