"""One call measures all that is measured on a GPU: tried on a CPU, where it measures nothing."""

import copy
import importlib
import json
import time

import jax
import pytest
import torch

from benchmarks import bits, gpu, paired, sides
from benchmarks.paired import DisagreementError


@pytest.mark.parametrize("name", gpu.JOBS)
def test_every_measurement_knows_its_options_and_takes_the_device(name, capsys):
    module, *options = gpu.JOBS[name]
    with pytest.raises(SystemExit) as ended:  # --help is the last that is read
        importlib.import_module(f"benchmarks.{module}").main([*options, "--device=gpu", "--smoke", "--help"])
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_device_that_one_side_lacks_is_named(monkeypatch):
    with pytest.raises(DisagreementError, match="--device=gpu: JAX computes on cpu, PyTorch has 0 GPUs"):
        sides.use("gpu")
    sides.use("cpu")
    assert jax.default_backend() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sides.use("gpu")


def test_the_card_and_its_clocks_are_recorded(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    said = "NVIDIA H200, 580.159.04, 143771 MiB, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = paired.card()
    assert (found["gpu"], found["driver"], found["clock_most"]) == ("NVIDIA H200", "580.159.04", "1980 MHz")
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert paired.card() == {}


def test_results_say_what_share_of_the_card_they_use():
    rows = {
        "step": {"flops": 989e9, "ours": 300.0, "theirs": 200.0},
        "search": {"bytes": 4.8e9, "ours": 0.002, "theirs": 0.001},
        "neither": {"ours": 1.0, "theirs": 1.0},
    }
    found = gpu.with_shares({"rows": copy.deepcopy(rows)}, {"gpu": "NVIDIA H200"})["rows"]
    assert (found["step"]["mfu_ours"], found["step"]["mfu_theirs"]) == (0.3, 0.2)
    assert (found["search"]["bandwidth_ours"], found["search"]["bandwidth_theirs"]) == (0.5, 1.0)
    assert found["neither"] == rows["neither"]
    assert gpu.with_shares({"rows": copy.deepcopy(rows)}, {"gpu": "another"})["rows"] == rows


def test_few_compile_at_once_and_the_first_first(monkeypatch):
    running, started, most = [], [], []

    class Process:
        def __init__(self, words, **options):
            assert words[-1] == "--rounds=1"
            started.append(words[0])
            running.append(self)
            most.append(len(running))

        def poll(self):
            running.remove(self)
            return 0

    monkeypatch.setattr(gpu.subprocess, "Popen", Process)
    gpu.warm({name: [name] for name in "abcde"}, {}, time.monotonic() + 10.0, 2)
    assert ("".join(started), max(most)) == ("abcde", 2)
    gpu.warm({"f": ["f"]}, {}, time.monotonic(), 2)
    assert "f" not in started


def test_what_fails_or_has_no_time_is_left_out_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "JOBS", {"broken": ("exact", "--rows=none")})
    said = gpu.main(["--smoke", "--device=cpu", f"--output={tmp_path}", "--only", "broken"])
    assert "invalid int value: 'none'" in said["left_out"]["broken"]
    assert gpu.main(["--smoke", "--device=cpu", "--seconds=5"])["left_out"] == {"broken": "no time was left"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["measured"] == []
    assert not list(tmp_path.iterdir())


def test_bits_are_compared_of_updates_of_one_task(monkeypatch):
    made = []
    monkeypatch.setattr(bits, "updates", lambda task, *given: made.append(task) or (lambda: None, []))
    rows = bits.main(["--smoke", "--device=cpu"])["rows"]
    assert rows["an update"]["same_ours"] is rows["an update"]["same_theirs"] is True
    assert made[0] is made[1]


@pytest.mark.slow
def test_results_are_files_of_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    said = gpu.main(["--smoke", "--device=cpu", "--output=~", "--only", "exact"])
    assert said["measured"] == ["exact"]
    assert json.loads((tmp_path / "cpu" / "exact.json").read_text())["benchmark"] == "exact"
