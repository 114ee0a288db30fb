"""One writer in a work directory at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from empax.core.config import ConfigError
from empax.core.files import WorkDir

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def writing(files: WorkDir, where: str = "--workdir") -> Iterator[None]:
    """Holds the lock of a work directory, which the user gave as `where`.

    The kernel releases the lock when its process dies, so nobody has to remove the file LOCK. On a file system without
    locks, the file itself is the lock until its process has ended, as far as this machine can tell.

    Raises:
      ConfigError: another process holds the lock (the message names it and its start), or the folder is not writable.
    """
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        descriptor = _acquired(files, where)
    except OSError as error:
        raise ConfigError(
            f"{where}={files.root} cannot be written ({error.strerror or error}); give a writable folder."
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            files.lock.unlink()
        os.close(descriptor)


def holder(files: WorkDir) -> str:
    """Describes the process that writes in a work directory; empty if there is none that this machine knows."""
    about = _read(files.lock)
    return _described(about) if about and _is_alive(about) else ""


def _acquired(files: WorkDir, where: str) -> int:
    while True:
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            about = _read(files.lock)
            unsupported = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
            if not unsupported or (about and _is_alive(about)):
                os.close(descriptor)
                raise _refusal(files, about, where) from error
        if _is_still_at(descriptor, files.lock):
            break
        os.close(descriptor)  # the previous holder removed it in the meantime
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(_about_this_process()).encode(), 0)
    os.fsync(descriptor)
    return descriptor


def _is_still_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _refusal(files: WorkDir, about: dict[str, Any], where: str) -> ConfigError:
    who = _described(about) if about else "another process"
    return ConfigError(
        f"{files.root} is in use: {who} is running in it. Wait until it has finished, end it, or choose another "
        f"{where}."
    )


def _about_this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.argv),
    }


def _described(about: dict[str, Any]) -> str:
    return f"process {about['pid']} on {about['host']}, since {about['since']} ({about['command']})"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and set(_about_this_process()) <= set(found) else {}


def _is_alive(about: dict[str, Any]) -> bool:
    if about["host"] != socket.gethostname():
        return True  # this machine cannot tell
    return about["boot"] == _boot() and _start_of(about["pid"]) == about["started"] != ""


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def _start_of(pid: int) -> str:
    """Returns the kernel's start time of a process, since process ids are reused; empty if it does not exist."""
    path = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return path.read_text().rpartition(")")[2].split()[19]
        except OSError:
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"
