"""Talking to a finished run in a terminal."""

import re

from empax.core.types import ATTRIBUTES


def test_chat_shows_reply_feeling_attributes_and_exemplars(command, finished):
    result = command(
        "-m", "empax.chat", f"--workdir={finished}", "--exemplars=1", input="My dog died.\nHe was old.\n\nI won!\n"
    )
    assert result.returncode == 0, result.stderr
    turns = result.stdout.split("you> ")[1:]
    assert len(turns) == 5  # three replies, an empty line that starts over, the end
    for turn in (turns[0], turns[1], turns[3]):
        reply, about, exemplar, seconds = turn.rstrip("\n").split("\n")
        assert reply.startswith("empax>")
        levels = ", ".join(f"{name} (low|mid|high)" for name in ATTRIBUTES)
        assert re.fullmatch(rf" +\[you seem \w+; {levels}\]", about)
        assert re.fullmatch(r" +\(\w+\) .+ -> .+", exemplar)
        assert re.fullmatch(r" +\d+\.\d\d s", seconds)
    assert turns[2] == ""
    assert "sentiment low" in turns[0]
    assert "sentiment high" in turns[3]  # the sad beginning is forgotten


def test_a_folder_without_a_run_is_refused(command, tmp_path):
    result = command("-m", "empax.chat", f"--workdir={tmp_path}")
    assert result.returncode == 2
    assert f"error: {tmp_path} holds no run" in result.stderr
    assert "Traceback" not in result.stderr
