"""Several processes that train one model: how they join, which one writes, how the others wait.

All processes run the same command and see the same work directory. They train together; the first process runs every
other stage, and the others wait for its `DONE`. They wait by polling files, not in a collective, which would time out
after seconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from empax.core.config import ConfigError

log = logging.getLogger("empax")

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_POLL_SECONDS = 0.2
_LEAVING_SECONDS = 30  # how long a failed process waits for the others, before its exit ends them too


def initialize() -> None:
    """Joins the processes that a launcher has started; does nothing for a single process. Call before JAX is used.

    Either JAX_COORDINATOR_ADDRESS (HOST:PORT of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID name the processes, or
    EMPAX_DISTRIBUTED=1 makes JAX ask the cluster (TPU pods, SLURM). A process uses all devices that it sees; where
    SLURM runs several processes on a node, each uses one. JAX_LOCAL_DEVICE_IDS overrides this.

    Raises:
      ConfigError: only some of the three are set, or a number is invalid.
    """
    values = {name: os.environ.get(name, "") for name in _NAMES}
    if not any(values.values()):
        if os.environ.get("EMPAX_DISTRIBUTED", "") == "1":
            _join()
            _take_all_gpus_of_a_node()
        return
    missing = [name for name, value in values.items() if not value]
    if missing:
        raise ConfigError(f"the environment lacks {', '.join(missing)}; set all of {', '.join(_NAMES)}, or none.")
    address, *numbers = values.values()
    if not all(number.isdecimal() for number in numbers) or not int(numbers[1]) < int(numbers[0]):
        raise ConfigError(
            f"JAX_NUM_PROCESSES = {numbers[0]} and JAX_PROCESS_ID = {numbers[1]} must be numbers, the second below the "
            "first."
        )
    if int(numbers[0]) > 1:
        # Detection is off: on a SLURM node, JAX would take one GPU of all that the process sees.
        _join(
            coordinator_address=address,
            num_processes=int(numbers[0]),
            process_id=int(numbers[1]),
            cluster_detection_method="deactivate",
        )


def _join(**who: Any) -> None:
    # SIGTERM ends a process, or makes the training loop save and exit; JAX's service would only note it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**who, shutdown_timeout_seconds=_LEAVING_SECONDS)


def _take_all_gpus_of_a_node() -> None:
    """Gives a SLURM task all GPUs, instead of JAX's one, where the task has its node to itself."""
    tasks, nodes = (os.environ.get(name) for name in ("SLURM_NTASKS", "SLURM_STEP_NUM_NODES"))
    if tasks is not None and tasks == nodes and not os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        for kind in ("cuda", "rocm"):
            jax.config.update(f"jax_{kind}_visible_devices", "all")


def is_writer() -> bool:
    """Whether this process writes the shared files."""
    return jax.process_index() == 0


def wait_for(path: Path) -> None:
    """Waits until another process has written `path`. If that process dies, the launcher ends this one."""
    while not path.exists():
        time.sleep(_POLL_SECONDS)


def make_once(path: Path, make: Callable[[], object]) -> None:
    """Makes the first process call `make`, which writes `path`, unless it exists; all processes wait for it.

    The name of `path` must depend on everything that its contents depend on.
    """
    if is_writer() and not path.exists():
        make()
    wait_for(path)


def from_writer(value: np.ndarray) -> np.ndarray:
    """Returns the first process's `value`; every process must call it, with an array of the same shape and type."""
    if jax.process_count() == 1:
        return value
    return np.asarray(multihost_utils.broadcast_one_to_all(value))


def agreed(flag: bool) -> bool:
    """Whether the flag is set in any process; every process must call it at the same point."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def place(tree: Any, shardings: Any) -> Any:
    """Applies `jax.device_put` to arrays that every process holds whole; each process fills its own devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put(leaf: Any, sharding: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        whole = np.array(leaf)  # a copy: the placed array may be donated
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)


def local(tree: Any) -> Any:
    """Returns a copy, on one device of this process, of arrays that are replicated on all devices; does not block."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def whole(tree: Any) -> Any:
    """Gathers arrays that may be spread over processes, so that each process can read them."""
    if jax.process_count() == 1:
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)
