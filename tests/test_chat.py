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
        assert float(seconds.removesuffix(" s")) < 5  # nothing is compiled any more
    assert turns[2] == ""
    assert "sentiment low" in turns[0]
    assert "sentiment high" in turns[3]  # the sad beginning is forgotten


def test_a_run_without_its_checkpoint_is_refused(command, finished, tmp_path):
    for name in ("config.json", "prepare", "annotate", "attributes", "index", "reindex", "evaluate"):
        (tmp_path / name).symlink_to(finished / name)
    (tmp_path / "joint").mkdir()
    result = command("-m", "empax.chat", f"--workdir={tmp_path}")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert f"{tmp_path / 'joint' / 'best'} holds no complete checkpoint" in error
