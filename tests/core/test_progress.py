"""How far something is: lines in a log, a bar on a terminal, nothing where nobody asked."""

import logging
import sys
import time

import pytest

from empax.core import progress
from empax.core.progress import Progress, duration


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)


@pytest.mark.parametrize("logging_is_set_up", [True, False])
def test_a_redirected_log_has_a_line_now_and_then_with_the_time_left(quick, caplog, capsys, logging_is_set_up):
    lines = []

    def wait_for(words):
        while not any(words in line for line in lines):
            time.sleep(0.01)
            lines[:] = caplog.messages if logging_is_set_up else [*lines, *capsys.readouterr().err.splitlines()]

    with (
        caplog.at_level(logging.INFO if logging_is_set_up else logging.WARNING, logger="empax"),
        Progress("keys", total=40, unit="texts", initial=10) as shown,
    ):
        wait_for("10 of 40")
        shown.advance(10)
        wait_for("20 of 40")
    assert lines[0] == "keys: 10 of 40 texts (25%), the next are not done yet"
    assert lines[-1].startswith("keys: 20 of 40 texts (50%), ")
    assert lines[-1].endswith(" left")
    messages, printed = caplog.messages, capsys.readouterr().err
    assert (bool(messages), logging_is_set_up and bool(printed)) == (logging_is_set_up, False)
    time.sleep(0.15)
    assert (caplog.messages, capsys.readouterr().err) == (messages, "")


def test_the_time_left_is_that_of_what_is_left(quick, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    shown = Progress(None, total=1000, unit="steps", initial=400)
    shown.advance(200)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 400.0)
    assert shown.line() == "None: 600 of 1000 steps (60%), 10 min left"
    shown.close()
    assert Progress(None, total=0, unit="steps").line() == "None: 0 of 0 steps (0%), the first are not done yet"


@pytest.mark.parametrize(("label", "terminal"), [("keys", True), (None, True), (None, False)])
def test_a_terminal_has_a_bar_and_no_lines_and_without_a_label_nothing(
    quick, caplog, capsys, monkeypatch, label, terminal
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with caplog.at_level(logging.INFO, logger="empax"), Progress(label, total=4, unit="texts") as shown:
        shown.advance(4)
        time.sleep(0.15)
    assert not caplog.messages
    printed = capsys.readouterr().err
    assert "keys: 100%" in printed if label else not printed


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5990.0, "100 min"), (9000.0, "2.5 h")]
)
def test_a_time_is_said_in_one_unit(seconds, words):
    assert duration(seconds) == words
