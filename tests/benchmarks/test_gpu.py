"""One call measures all that is measured on a GPU: tried on a CPU, where it measures nothing."""

import importlib
import json

import jax
import pytest
import torch

from benchmarks import gpu, paired, sides
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


def test_training_steps_say_what_share_of_the_card_they_use():
    rows = {"a": {"flops": 989e9, "ours": 300.0, "theirs": 200.0}, "b": {"ours": 1.0, "theirs": 1.0}}
    found = gpu.with_mfu({"rows": rows}, {"gpu": "NVIDIA H200"})["rows"]
    assert (found["a"]["mfu_ours"], found["a"]["mfu_theirs"]) == (0.3, 0.2)
    assert "mfu_ours" not in found["b"]


def test_what_fails_or_has_no_time_is_left_out_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "JOBS", {"broken": ("exact", "--rows=none")})
    said = gpu.main(["--smoke", "--device=cpu", f"--output={tmp_path}", "--only", "broken"])
    assert "invalid int value: 'none'" in said["left_out"]["broken"]
    assert gpu.main(["--smoke", "--device=cpu", "--seconds=5"])["left_out"] == {"broken": "no time was left"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["measured"] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_results_are_files_of_the_card(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    said = gpu.main(["--smoke", "--device=cpu", "--output=~", "--only", "exact"])
    assert said["measured"] == ["exact"]
    assert json.loads((tmp_path / "cpu" / "exact.json").read_text())["benchmark"] == "exact"
