"""A system for tests of the server: quick, and it tells what it was asked."""

import threading

import numpy as np

from empax.core.config import ConfigError
from empax.serving.web.systems import Said


class Stub:
    options = frozenset({"temperature", "top_p", "max_tokens", "seed"})

    def __init__(self, name="stub", batch_size=4):
        self.name, self.batch_size, self.batches = name, batch_size, []
        self.free, self.busy = threading.Event(), threading.Event()
        self.free.set()

    def group(self, asked):
        if asked.max_tokens == 999:
            raise ConfigError("max_tokens = 999 must be from 1 to 256.")
        return asked.temperature

    def answer(self, asked):
        self.busy.set()
        assert self.free.wait(20)
        self.batches.append([a.turns[-1] for a in asked])
        if any("break" in a.turns[-1] for a in asked):
            raise RuntimeError("secret words")
        return [Said(f"{self.name} heard {a.turns[-1]}", len(a.turns), 4, why={"emotion": "sad"}) for a in asked]

    def embed(self, texts):
        return np.array([[len(text), 0.5] for text in texts], np.float32), sum(map(len, texts))
