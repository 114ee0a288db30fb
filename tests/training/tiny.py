"""A task, examples and settings small enough to train in a second; as a script, a run that can kill itself.

python tiny.py WORKDIR [STEP [PROCESS]]: trains, and with STEP dies by SIGKILL once that many updates have been made; of
several processes, PROCESS does (0).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from empax.core import distributed
from empax.core.files import write_text
from empax.core.sharding import MeshSettings, make_mesh
from empax.core.system import Assembly
from empax.core.types import Batch, Mean
from empax.training import loop
from empax.training.metrics_log import ProgressBar
from empax.training.optimizer import OptimizerSettings, ParamGroup

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


@dataclasses.dataclass(frozen=True)
class TinyTask:
    """Predicts each target token from the mean of the source embeddings."""

    dropout: float = 0.0

    def init(self, rng, batch):
        keys = jax.random.split(rng, 3)
        return {
            "embed": {"table": jax.random.normal(keys[0], (VOCABULARY, WIDTH))},
            "hidden": {"kernel": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 3, "bias": jnp.zeros(WIDTH)},
            "out": {"kernel": jax.random.normal(keys[2], (WIDTH, batch.target.shape[1] * VOCABULARY)) / 3},
        }

    def loss(self, params, frozen, batch, rng, *, train):
        embedded = params["embed"]["table"][batch.source] * batch.source_mask[..., None]
        mean = embedded.sum(1) / jnp.maximum(batch.source_mask.sum(1, keepdims=True), 1)
        hidden = jnp.tanh(mean @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
        if train and self.dropout:
            hidden *= jax.random.bernoulli(rng, 1 - self.dropout, hidden.shape) / (1 - self.dropout)
        logits = (hidden @ params["out"]["kernel"]).reshape(*batch.target.shape, VOCABULARY)
        logits += frozen["bias"][None, None]
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.target[..., None], axis=-1)[..., 0]
        mask = batch.target_mask & batch.valid[:, None]
        return Mean.of(-log_probs, mask), {"accuracy": Mean.of(logits.argmax(-1) == batch.target, mask)}


class Reinforced:
    """What a `ReinforcedTask` has beside its loss, doing nothing."""

    rates_on_host = False

    def learns_from(self, name):
        return 0

    def init_memory(self):
        return {}

    def rollout(self, params, frozen, batch, rng):
        return batch

    def rate(self, frozen, batch):
        return batch

    def credit(self, frozen, batch, memory):
        return batch, memory, {}

    def check_start(self, metrics, *, step):
        pass

    def check_progress(self, metrics, *, step):
        pass


class TinyExamples:
    """Seeded rows of varying length; `shift` stands for what a refresh changes."""

    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        self.source = rng.integers(1, VOCABULARY, (count, LENGTH))
        self.target = (self.source + self.source[:, :1]) % VOCABULARY
        self.lengths = rng.integers(2, LENGTH + 1, count)
        self.shift = 0

    def __len__(self):
        return len(self.lengths)

    def collate(self, indices, length, rng):
        valid = indices >= 0
        lengths = np.where(valid, self.lengths[indices], 0)
        mask = np.arange(length)[None] < lengths[:, None]
        source = np.where(mask, self.source[indices][:, :length], 0)
        target_mask = np.arange(LENGTH)[None] < lengths[:, None]
        target = np.where(target_mask, (self.target[indices] + self.shift) % VOCABULARY, 0)
        return Batch(source.astype(np.int32), mask, target.astype(np.int32), target_mask, valid)


def frozen():
    return {"bias": jnp.linspace(0.0, 1.0, VOCABULARY)}


def settings(**changes):
    optimizer = OptimizerSettings(
        learning_rate=3e-2,
        warmup_steps=3,
        schedule="cosine",
        weight_decay=0.01,
        ema_decay=0.7,
        groups=(ParamGroup("hidden", 0.5),),
    )
    values = {
        "steps": 14,
        "batch_size": 8,
        "buckets": (LENGTH,),
        "eval_batch_size": 4,
        "log_every_steps": 4,
        "eval_every_steps": 2,
        "checkpoint_every_steps": 3,
        "patience": 5,
        "max_eval_examples": 7,
        "refresh_every_steps": 5,
        "optimizer": optimizer,
    }
    return loop.LoopSettings(**{**values, **changes})


def one_device():
    return make_mesh(MeshSettings(data=1))


def train(workdir, *, task=None, **changes):
    """One stage in `workdir`, with a refresh that depends on the parameters and is kept by its step."""
    examples = TinyExamples(24)
    directory = workdir / "tiny"
    directory.mkdir(parents=True, exist_ok=True)

    def on_refresh(step, params):
        kept = directory / f"refresh-{step}.txt"
        if params is not None:
            # By every process, so whole or not at all: another one may be reading it.
            write_text(kept, str(int(1000 * np.abs(np.asarray(params["embed"]["table"])).sum()) % VOCABULARY))
        examples.shift = int(kept.read_text())

    parts = {"validation": TinyExamples(10, seed=1), "frozen": frozen(), "on_refresh": on_refresh}
    parts |= {name: changes.pop(name) for name in ("validation", "initial", "on_refresh", "on_end") if name in changes}
    assembly = Assembly(task or TinyTask(dropout=0.2), examples, **parts)
    return loop.fit(assembly, **{"settings": settings(), "directory": directory, "mesh": one_device(), **changes})


def stop_at(step, action):
    """A progress bar that calls `action` once `step` updates have been made."""

    class Bar(ProgressBar):  # not loop's, which a test may have replaced: its stop would come too
        def __init__(self, stage, *, steps, initial):
            super().__init__(stage, steps=steps, initial=initial)
            self.done = initial

        def advance(self):
            super().advance()
            self.done += 1
            if self.done == step:
                action()

    return Bar


if __name__ == "__main__":
    distributed.initialize()
    if len(sys.argv) > 2 and jax.process_index() == int([*sys.argv[3:], "0"][0]):
        loop.ProgressBar = stop_at(int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(Path(sys.argv[1]), mesh=one_device() if jax.process_count() == 1 else make_mesh())
