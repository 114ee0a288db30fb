"""`python -m empax.main` in a process of its own, that can check shapes and stop itself.

python drive.py [--check] [--stop=STAGE:STEP:SIGNAL] FLAGS-OF-MAIN...

With --check every annotated shape is checked. With --stop the process sends itself SIGNAL as soon as STAGE has made
STEP updates, or kept the answers to STEP batches.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import jax
from jaxtyping import install_import_hook

from empax.core.types import Prediction

PACKAGES = [f"empax.{name}" for name in ("models", "losses", "decoding", "retrieval", "training", "evaluation")]


def stop_at(stage: str, step: int, number: signal.Signals) -> None:
    """Puts a progress bar into the loop that sends `number` to this process."""
    from empax.training import loop

    class Bar(loop.ProgressBar):
        def __init__(self, name: str, *, steps: int, initial: int) -> None:
            super().__init__(name, steps=steps, initial=initial)
            self.name, self.done = name, initial

        def advance(self) -> None:
            super().advance()
            self.done += 1
            if (self.name, self.done) == (stage, step):
                os.kill(os.getpid(), number)

    loop.ProgressBar = Bar

    from empax.pipeline import answers, evaluate

    class Kept(answers.KeptAnswers):
        def add(self, batch: int, answers: Mapping[int, Prediction]) -> None:
            super().add(batch, answers)
            self.flush()
            if (self._folder.parent.name, batch + 1) == (stage, step):
                os.kill(os.getpid(), number)

    evaluate.KeptAnswers = Kept


def keep_all_programs() -> None:
    """Has even the quickest compilation kept: a run that is started again and again repeats hundreds of them."""
    from empax.core import cache

    enable = cache.enable_compilation_cache

    def enable_all() -> None:
        enable()
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    cache.enable_compilation_cache = enable_all


def leave_with_parent() -> None:
    """Ends this process once the tests that began it have ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    leave_with_parent()
    words = sys.argv[1:]
    if words[0] == "--check":
        words.pop(0)
        install_import_hook(PACKAGES, "beartype.beartype")
    if words[0].startswith("--stop="):
        stage, step, name = words.pop(0).removeprefix("--stop=").split(":")
        stop_at(stage, int(step), signal.Signals[name])
    keep_all_programs()
    from empax import main

    sys.argv = ["empax.main", *words]
    main.command_line()
