"""Ctrl-C and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_STDERR = 2
_SAME_SECONDS = 1.0  # after the first signal, others mean the same: a launcher hands on what the terminal sent to all


class Interrupted(Exception):  # noqa: N818 (no error: the user asked for it)
    """Ctrl-C or SIGTERM; everything is saved. The process should leave with `exit_code`."""

    exit_code = 130


class InterruptSignals:
    """While entered, the first Ctrl-C or SIGTERM sets `received`; a Ctrl-C more than a second later kills.

    A SIGTERM that follows changes nothing: launchers send several, and have SIGKILL for those that do not leave.
    """

    def __init__(self) -> None:
        self.received = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> InterruptSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self.received:
            self.received, self._since = True, time.monotonic()
            # Not through `logging`: the code that was interrupted may hold its lock.
            os.write(_STDERR, b"\nFinishing this step and saving; Ctrl-C once more to stop at once.\n")
        elif number == signal.SIGINT and time.monotonic() - self._since > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
