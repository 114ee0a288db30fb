"""What signals do while something is to be saved, in processes of their own: they may die of them."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from empax.training import interruption

interruption._SAME_SECONDS = 0.2
{before}
with interruption.InterruptSignals() as signals:
    {body}
print("saved" if signals.received else "went on")
"""


def run(body, before="pass"):
    script = SCRIPT.format(body="\n    ".join(body), before=before)
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)


def send(name):
    return f"os.kill(os.getpid(), signal.{name})"


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_two_signals_at_once_count_as_one(first, second):
    result = run([send(first), send(second)])
    assert (result.returncode, result.stdout) == (0, "saved\n"), result.stderr
    assert result.stderr.count("Finishing this step;") == 1


def test_signals_that_arrive_in_the_same_instant_count_as_one():
    """Python sees both before it runs a handler, as it does after a long call into XLA."""
    both = "{signal.SIGINT, signal.SIGTERM}"
    block, unblock = (f"signal.pthread_sigmask(signal.SIG_{what}, {both})" for what in ("BLOCK", "UNBLOCK"))
    result = run([block, send("SIGINT"), send("SIGTERM"), unblock])
    assert (result.returncode, result.stdout) == (0, "saved\n"), result.stderr
    assert "race condition" not in result.stderr


@pytest.mark.parametrize(
    ("first", "before"),
    [
        ("SIGINT", "interruption.leave_at_ctrl_c()"),
        ("SIGTERM", "interruption.leave_at_ctrl_c()"),
        ("SIGINT", "signal.signal(signal.SIGINT, signal.SIG_DFL)"),
    ],
)
def test_a_later_ctrl_c_ends_a_command_line_at_once(first, before):
    body = [send(first), "time.sleep(0.3)", send("SIGINT"), "time.sleep(30)"]
    result = run(body, before)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.count("Interrupted; finished work is kept") == 1


def test_a_later_ctrl_c_in_a_script_or_a_notebook_is_a_keyboard_interrupt():
    body = ["try:", f"    {send('SIGINT')}", "    time.sleep(0.3)", f"    {send('SIGINT')}", "    time.sleep(30)",
            "except KeyboardInterrupt:", "    signals.received = False"]  # fmt: skip
    usual = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background begins without it
    result = run(body, before=usual)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


def test_a_later_sigterm_changes_nothing():
    result = run([send("SIGINT"), "time.sleep(0.3)", send("SIGTERM")])
    assert (result.returncode, result.stdout) == (0, "saved\n")


LEAVE = """
import os, signal, sys
from pathlib import Path
from empax.core.files import replacing
from empax.training.interruption import leave_at_ctrl_c

leave_at_ctrl_c()
with replacing(Path(sys.argv[1])) as path:
    path.write_text("half")
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # as some libraries do
        pass
    path.write_text("whole")
"""


def test_ctrl_c_outside_of_training_is_one_line_and_leaves_no_half_of_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    command = [sys.executable, "-W", "error", "-c", LEAVE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 130
    assert result.stderr.strip() == "Interrupted; finished work is kept; run again to continue."
    assert path.read_text() == "old"


def test_nothing_is_received_without_a_signal():
    assert run(["pass"]).stdout == "went on\n"
