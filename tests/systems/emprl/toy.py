"""A policy small enough to learn in seconds: say what counts, without leaving the first policy by more than 10 nats.

python toy.py FORM WORKDIR [STEP]: trains, and with STEP dies by SIGKILL once that many batches have been learnt from
and there is a checkpoint to go on from.
"""

import dataclasses
import logging
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from empax.core.sharding import MeshSettings, make_mesh
from empax.core.system import Assembly
from empax.data.exemplars import LabelledBatch
from empax.decoding.settings import DecodeSettings
from empax.models.heads import ClassificationHead
from empax.models.transformer import EncoderDecoder, scratch
from empax.parts.generator.decoder import Decoder
from empax.parts.generator.task import Generator
from empax.systems.emprl.rewards import Part, Reward, compiled, rate_on_host, rate_texts
from empax.systems.emprl.rollouts import PolicyBatch, Rollout
from empax.systems.emprl.settings import GrpoTaskSettings, KlSettings, PpoTaskSettings, PreferenceTaskSettings
from empax.systems.emprl.tasks import ALGORITHMS
from empax.training import loop
from empax.training.optimizer import OptimizerSettings, ParamGroup

VOCABULARY, SOURCE, TOKENS, EOS, PAD, START = 24, 6, 8, 1, 0, 2
WANTED = 18
"""Ids from here on are what the reward counts: a quarter of the vocabulary."""

FORMS = {"ppo": {}, "warmup": {"value_warmup_steps": 7}, "host": {"host": True}, "grpo": {"grpo": True},
         "dpo": {"preference": True}}  # fmt: skip
"""Ways to train it, by the name that the command line takes."""

MODEL = EncoderDecoder(
    scratch(
        VOCABULARY, d_model=32, num_heads=2, head_dim=16, d_ff=64, num_encoder_layers=1, num_decoder_layers=1,
        start_id=START, alternating_norm=False,
    )
)  # fmt: skip
"""Its first policies repeat tokens, so that it takes few nats to say one that counts again and again."""
ROLLOUT = DecodeSettings(method="sample", max_tokens=TOKENS)


def share(rollout):
    """Of a response's tokens, how many are wanted."""
    wanted = (rollout.tokens >= WANTED) & rollout.mask
    return wanted.sum(axis=1) / jnp.maximum(rollout.mask.sum(axis=1), 1)


class Words:
    """A tokenizer of the toy's vocabulary; no padding, start or end is a word."""

    pad_id, eos_id, start_id, vocab_size, unk_id = PAD, EOS, START, VOCABULARY, None

    def decode(self, ids, words=()):
        return " ".join(f"w{i}" for i in ids if i > START)

    def encode_batch(self, texts):
        return [[int(word[1:]) for word in text.split()] for text in texts]


def share_of_texts(contexts, responses, references):
    assert len(contexts) == len(responses) == len(references)
    words = [response.split() for response in responses]
    return [np.mean([int(w[1:]) >= WANTED for w in row]) if row else 0.0 for row in words]


def policy(*, host=False, grpo=False, preference=False, reward=share, **changes):
    if preference:
        stage = PreferenceTaskSettings(rollout=dataclasses.replace(ROLLOUT, num_samples=4), **changes)
    elif grpo:
        rollout = dataclasses.replace(ROLLOUT, num_samples=4)
        stage = GrpoTaskSettings(rollout=rollout, kl=KlSettings(coefficient=0.02, controller="fixed"), **changes)
    else:
        settings = {"rollout": ROLLOUT, "kl": KlSettings(coefficient=0.05, controller="adaptive", target=6.0)}
        stage = PpoTaskSettings(**{**settings, **changes})
    decoder = Decoder(stage.rollout, start_id=START, eos_id=EOS, pad_id=PAD)
    generator = Generator(MODEL, decoder, ClassificationHead(num_classes=32), emotion_weight=0.0)
    part = Part("share", 1.0, compiled(reward))
    if host:
        rate = rate_texts(share_of_texts, "share_of_texts", Contexts(64).instances)
        part = Part("share", 1.0, rate_on_host(rate, Words()), on_host=True)
    return ALGORITHMS[type(stage)](generator, Reward((part,)), stage)


@dataclasses.dataclass(frozen=True)
class Turn:
    context: tuple[str, ...] = ("hello",)
    response: str = "w20"


class Contexts:
    """Random contexts."""

    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        self.source = rng.integers(3, VOCABULARY, (count, SOURCE)).astype(np.int32)
        self.lengths = rng.integers(2, SOURCE + 1, count)
        self.instances = [Turn()] * count

    def __len__(self):
        return len(self.lengths)

    def collate(self, indices, length, rng):
        rows, valid = np.maximum(indices, 0), np.asarray(indices) >= 0
        target = np.tile(np.array([[20, 19, EOS]], np.int32), (len(rows), 1))
        mask = (np.arange(length)[None] < self.lengths[rows, None]) & valid[:, None]
        emotion = np.where(valid, 3, -1).astype(np.int32)
        source = self.source[rows][:, :length] * mask
        inputs = LabelledBatch(source, mask, target, target > 0, valid, emotion)
        wanted, merit = np.zeros((len(rows), 1, 3), np.float32), np.zeros(len(rows), np.float32)
        return PolicyBatch(inputs, np.asarray(indices, np.int32), wanted, merit)


def gold_log_probs(params, batch):
    """Of each token of the gold responses in `Contexts`."""
    inputs = batch.inputs
    model = {"params": params["model"]}
    logits = jax.jit(MODEL.apply)(model, inputs.source, inputs.source_mask, inputs.target)
    return np.asarray(jax.nn.log_softmax(logits))[:, np.arange(3), [20, 19, EOS]]


def saying(tokens, batch=None):
    """A rollout of these ids."""
    tokens = jnp.asarray(tokens)
    return Rollout(batch, tokens, tokens != PAD, *[jnp.zeros(tokens.shape)] * 2)


def credited(task, frozen, rollout):
    """The rollout, rated and credited; the memory after it; and what is logged of it."""
    return jax.jit(task.credit)(frozen, task.rate(frozen, rollout), task.init_memory())


def frozen(seed=0):
    """The model that training begins with."""
    batch = Contexts(4).collate(np.arange(4), SOURCE, np.random.default_rng(0))
    params = jax.jit(policy().generator.init)(jax.random.key(100 + seed), batch.inputs)
    return {"reference": {"model": params["model"]}, "reward": {"0": {}}}


def train(workdir, *, seed=0, steps=60, start=None, **changes):
    """`fit` of the toy; returns what it returned."""
    given = frozen(seed)
    has_values = not (changes.get("grpo") or changes.get("preference"))
    groups = (ParamGroup(pattern="^value/", learning_rate_scale=3.0),) if has_values else ()
    settings = loop.LoopSettings(
        steps=steps, batch_size=32, buckets=(SOURCE,), epochs=4, minibatches=2, seed=seed, log_every_steps=5,
        eval_every_steps=30, checkpoint_every_steps=5, best_metric=None,
        optimizer=OptimizerSettings(learning_rate=3e-3, groups=groups),
    )  # fmt: skip
    first = given["reference"]["model"] if start is None else start
    initial = lambda params: {**params, "model": first}  # noqa: E731
    assembly = Assembly(policy(**changes), Contexts(64), Contexts(8, seed=1), frozen=given, initial=initial)
    mesh = make_mesh(MeshSettings(data=1), devices=jax.devices()[:1])
    return loop.fit(assembly, settings=settings, directory=Path(workdir) / "ppo", mesh=mesh)


if __name__ == "__main__":
    form, workdir, *rest = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, force=True)
    if rest:
        deadly = int(rest[0])

        class Dying(loop.MetricsLog):
            def write(self, step, *arguments):
                super().write(step, *arguments)
                if step < deadly:
                    return
                while not any(Path(workdir).glob("ppo/checkpoints/*/COMPLETE")):  # they are written in the background
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)

        loop.MetricsLog = Dying
    train(workdir, steps=12, **FORMS[form])
