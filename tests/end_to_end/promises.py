"""What every system promises: answers from the context alone, and the same bits after a kill."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np

from empax.core.types import EMOTIONS
from empax.data.store import load_instances
from empax.serving.session import Session
from empax.training.checkpoint import load_params
from tests.plans import context_of

CONTEXTS = 8


def assert_gold_is_not_read(workdir: Path) -> None:
    """Other gold responses and emotions change no reply, no exemplar and no emotion of test contexts.

    Nor do other emotions change likelihoods: models of a few updates may say the same to every context.
    """
    run = context_of(workdir, "evaluate")
    asked = load_instances(run, "test")[:CONTEXTS]
    felt = [dataclasses.replace(one, emotion=EMOTIONS[(EMOTIONS.index(one.emotion) + 7) % 32]) for one in asked]
    other = [dataclasses.replace(one, response="blue bread") for one in felt]
    answerer = Session.load(workdir).answerer
    known, alike, unknown = (answerer.respond(rows, batch_size=CONTEXTS, seed=0) for rows in (asked, felt, other))
    for a, b in zip(known, unknown, strict=True):
        assert a.response == b.response
        assert a.exemplars == b.exemplars
        assert a.notes.get("emotion_by_head") == b.notes.get("emotion_by_head")
    likelihoods = [[one.notes.get("nll") for one in rows] for rows in (known, alike, unknown)]
    assert likelihoods[1] == likelihoods[0]
    assert likelihoods[2] != likelihoods[0]


def assert_a_killed_run_ends_the_same(whole: Path, broken: Path, recipe, config: str, stage: str, last: str) -> None:
    """A copy of `whole`, redone from `stage` on, killed at its third update and resumed, ends with the same bits."""
    shutil.copytree(whole, broken)
    recipe(broken, f"--stop={stage}:3:SIGKILL", f"--redo={stage}", config=config, code=-9)
    assert not (broken / stage / "DONE").exists()
    recipe(broken, config=config)
    for trained in (stage, last):
        jax.tree.map(np.testing.assert_array_equal, *(load_params(run / trained, "last") for run in (whole, broken)))
    assert (whole / "predictions.jsonl").read_bytes() == (broken / "predictions.jsonl").read_bytes()
