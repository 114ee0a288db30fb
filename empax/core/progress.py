"""Progress reports: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time

from tqdm import tqdm

from empax.core import distributed

log = logging.getLogger("empax")

LINE_SECONDS = 30.0
"""Time between two lines."""


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Counts progress towards `total`, on standard error or, if that is not a terminal, in the log.

    Lines appear even without progress, so that compilation does not look like a hang. With several processes, only the
    first one reports. Without a `label` for the bar and the lines, nothing is shown. `unit` names the items, in the
    plural; `initial` of them were done before.
    """

    def __init__(self, label: str | None, *, total: int, unit: str, initial: int = 0) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._initial = self._done = initial
        self._begin = time.monotonic()
        self._over = threading.Event()
        shown = label is not None and distributed.is_writer()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=initial, desc=label, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True,
            leave=None, disable=not (shown and terminal),
        )  # fmt: skip
        self._speaker = threading.Thread(target=self._speak, daemon=True) if shown and not terminal else None
        if self._speaker is not None:
            self._speaker.start()

    def advance(self, count: int = 1) -> None:
        """Adds `count` to the progress."""
        self._done += count
        self._bar.update(count)

    def note(self, text: str) -> None:
        """Shows `text` after the bar."""
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        self._bar.close()
        self._over.set()
        if self._speaker is not None:
            self._speaker.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def line(self) -> str:
        """Formats the progress and the time left, at the rate so far."""
        seconds, since = time.monotonic() - self._begin, self._done - self._initial
        left = "the next are not done yet" if self._initial else "the first are not done yet"
        if since:
            left = f"{duration(seconds * (self._total - self._done) / since)} left"
        share = 100 * self._done // max(self._total, 1)
        return f"{self._label}: {self._done} of {self._total} {self._unit} ({share}%), {left}"

    def _speak(self) -> None:
        while not self._over.wait(LINE_SECONDS):
            if log.isEnabledFor(logging.INFO):
                log.info("%s", self.line())
            else:  # in a script without logging
                print(self.line(), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Formats a duration: "50 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
