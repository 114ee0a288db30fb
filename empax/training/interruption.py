"""Ctrl-C and SIGTERM: training finishes the step, saves and exits; other code exits at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_STDERR = 2
_SAME_SECONDS = 1.0  # signals this soon after the first count as one: a launcher forwards the terminal's


class Interrupted(Exception):  # noqa: N818 (not an error: the user asked for it)
    """Ctrl-C or SIGTERM after `step`; everything is saved. The process should exit with `exit_code`."""

    exit_code = 130

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


def leave_at_ctrl_c() -> None:
    """From now on, Ctrl-C prints one line and exits the process with code 130.

    It raises no exception, which running code could swallow. Files are written so that a process may end at any time.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    # Not through `logging`: the interrupted code may hold its lock.
    os.write(_STDERR, b"\nInterrupted; finished work is kept; run again to continue.\n")
    os._exit(Interrupted.exit_code)


class InterruptSignals:
    """While active, sets `received` on the first Ctrl-C or SIGTERM; a Ctrl-C over a second later acts as before.

    That exits the process of a command, and raises KeyboardInterrupt in a script or a notebook. Later SIGTERMs are
    ignored: launchers send several, and SIGKILL a process that does not exit.
    """

    def __init__(self) -> None:
        self.received = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> InterruptSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers in no other thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._since = True, time.monotonic()
            os.write(_STDERR, b"\nFinishing this step; Ctrl-C once more to stop at once.\n")
        elif number == signal.SIGINT and time.monotonic() - self._since > _SAME_SECONDS:
            before = self._before[number]
            (before if callable(before) else _leave)(number, frame)
