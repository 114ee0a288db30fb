"""A system for tests of the server: quick, and it tells what it was asked."""

import threading

import numpy as np

from empax.core.config import ConfigError
from empax.serving.streaming import place_of_stop
from empax.serving.web.systems import Said


class Stub:
    options = frozenset({"temperature", "top_p", "max_tokens", "seed"})

    def __init__(self, name="stub", batch_size=4, why=None):
        self.why = why or {"emotion": "sad"}
        self.name, self.batch_size, self.batches = name, batch_size, []
        self.heard = []
        self.free, self.busy = threading.Event(), threading.Event()
        self.going_on, self.given_up = threading.Event(), threading.Event()
        self.free.set()
        self.going_on.set()

    def at_once(self, asked):
        return Said("Please call somebody.", 0, 0, why={"fixed": True}) if "danger" in asked.turns[-1] else None

    def group(self, asked):
        if asked.max_tokens == 999:
            raise ConfigError("max_tokens = 999 must be from 1 to 256.")
        return asked.temperature

    def answer(self, asked, waits=lambda i: True):
        self.busy.set()
        assert self.free.wait(20)
        self.batches.append([a.turns[-1] for a in asked])
        self.heard += [a.turns for a in asked]
        if any("break" in a.turns[-1] for a in asked):
            raise RuntimeError("secret words")
        for i, a in enumerate(asked):
            text = f"{self.name} heard {a.turns[-1]}"
            text = text[: place_of_stop(text, a.stop)]
            words = text.split(" ")
            for k, word in enumerate(words):
                if not waits(i):
                    self.given_up.set()
                    return
                yield i, " " * (k > 0) + word
                if k == 1:  # in the middle
                    assert self.going_on.wait(20)
            if "late" in text:
                raise RuntimeError("secret words")
            yield i, Said(text, len(a.turns), 4, why=self.why)

    def embed(self, texts):
        return np.array([[len(text), 0.5] for text in texts], np.float32), sum(map(len, texts))
