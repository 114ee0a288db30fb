"""One writer in a work directory at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator

from empax.core.config import ConfigError
from empax.core.files import WorkDir

log = logging.getLogger("empax")

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Errors of `flock` where another process holds the lock; the others mean that the file system has no locks."""


@contextlib.contextmanager
def writing(files: WorkDir, where: str = "--workdir") -> Iterator[None]:
    """Holds the lock of a work directory, which the user gave as `where`.

    The kernel releases the lock when its process dies, so nobody has to remove the file LOCK.

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
    """Describes the process that writes in a work directory; empty if there is none."""
    try:
        descriptor = os.open(files.lock, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _writer(files) if error.errno in _HELD else ""
    finally:
        os.close(descriptor)
    return ""


def _acquired(files: WorkDir, where: str) -> int:
    while True:
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                os.close(descriptor)
                raise ConfigError(
                    f"{files.root} is in use: {_writer(files)} is running in it. Wait until it has finished, end it, "
                    f"or choose another {where}."
                ) from error
            log.warning("The file system of %s has no locks: nothing keeps a second run out.", files.root)
        if _is_still_there(descriptor, files):
            break
        os.close(descriptor)  # the previous holder removed it in the meantime
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.argv),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(about).encode(), 0)
    os.fsync(descriptor)
    return descriptor


def _is_still_there(descriptor: int, files: WorkDir) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), files.lock.stat())
    except FileNotFoundError:
        return False


def _writer(files: WorkDir) -> str:
    """Describes the process that has written LOCK."""
    try:
        about = json.loads(files.lock.read_bytes())
        return f"process {about['pid']} on {about['host']}, since {about['since']} ({about['command']})"
    except (OSError, ValueError, TypeError, KeyError):  # it has just begun
        return "another process"
