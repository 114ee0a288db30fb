"""What a system needs is in the shared rooms: small tasks of two kinds train, resume and answer through them."""

from pathlib import Path

import numpy as np
import pytest

from empax.core.files import WorkDir, read_jsonl
from empax.core.tree import named_leaves
from empax.pipeline import run
from empax.serving.session import Session
from empax.training import loop
from empax.training.checkpoint import load_params


def recipe(task):
    return {
        "seed": 0,
        "system": "toys:SYSTEM",
        "data": {"name": "sample", "limit": 40},
        "mesh": {"data": 1},
        "run": ["prepare", "model", "evaluate"],
        "toys": {},
        "prepare": {"kind": "prepare", "tokenizer": {"vocab_size": 400}},
        "model": {"kind": "train", "task": task, "steps": 6, "batch_size": 8, "buckets": [32], "log_every_steps": 3,
                  "eval_every_steps": 3, "checkpoint_every_steps": 2, "best_metric": None},
        "evaluate": {"kind": "evaluate", "stage": "model", "index": "", "buckets": [32], "batch_size": 8},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", ["knowledge", "diffusion"])
def test_a_task_trains_resumes_to_the_same_bits_and_answers(task, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    whole, broken = WorkDir(tmp_path / "whole"), WorkDir(tmp_path / "broken")
    run.run(recipe(task), whole.root)
    rows = list(read_jsonl(whole.predictions))
    assert rows
    assert all(row["response"] is not None and row["notes"]["nll"] > 0 for row in rows)
    assert Session.load(whole.root, before=None).reply(["I lost my keys."]).notes["num_tokens"] > 0

    class Stops(loop.ProgressBar):
        def advance(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        after = iter([None] * 3)
        patched.setattr(loop.ProgressBar, "advance", lambda self: next(after, 1) and Stops.advance(self))
        with pytest.raises(KeyboardInterrupt):
            run.run(recipe(task), broken.root)
    run.run(recipe(task), broken.root)
    expected, found = (named_leaves(load_params(files.stage("model"))) for files in (whole, broken))
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf)
    metrics = [[{k: v for k, v in row.items() if "seconds" not in k and "per_second" not in k}
                for row in read_jsonl(files.metrics)] for files in (whole, broken)]  # fmt: skip
    assert metrics[0] == metrics[1]
