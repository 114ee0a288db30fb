"""Talking to a finished run in a terminal."""

import os
import re
import subprocess
import sys

import pytest

from empax import chat
from empax.core.types import ATTRIBUTES, Prediction
from empax.serving.safety import ANSWER


def test_chat_shows_reply_feeling_attributes_and_exemplars(command, finished):
    result = command(
        "-m", "empax.chat", f"--workdir={finished}", "--exemplars=1", "--nosafety",
        input="My dog died.\nHe was old.\n\nI won!\n",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The model answers everything: --nosafety.\n")
    turns = result.stdout.split("you> ")[1:]
    assert len(turns) == 5  # three replies, an empty line that starts over, the end
    for turn in (turns[0], turns[1], turns[3]):
        reply, about, exemplar, seconds = turn.rstrip("\n").split("\n")
        assert reply.startswith("empax>")
        levels = ", ".join(f"{name} (low|mid|high)" for name in ATTRIBUTES)
        assert re.fullmatch(rf" +\[(you seem \w+; )?{levels}\]", about)
        assert re.fullmatch(r" +\(\w+\) .+ -> .+", exemplar)
        assert re.fullmatch(r" +\d+\.\d\d s", seconds)
    assert turns[2] == ""
    assert "sentiment low" in turns[0]
    assert "sentiment high" in turns[3]  # the sad beginning is forgotten


ECHO = """
from empax import chat
from empax.core.command import take_any_text
from empax.core.types import Prediction

class Echo:
    def reply(self, context):
        return Prediction(tuple(context), f"I heard {context[-1]!r}.", reference="")

take_any_text()
chat.converse(Echo(), exemplars=0)
"""


def run_python(code, encoding, written=b""):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run([sys.executable, "-c", code], input=written, capture_output=True, env=environment)


@pytest.mark.parametrize(
    ("written", "heard"),
    [
        (b"I am sad\n\xff\xfe caf\xe9\nand you?\n", ["I am sad", "\ufffd\ufffd caf\ufffd", "and you?"]),
        (b"I am sad\r\n\r\nI am happy", ["I am sad", "I am happy"]),
        ("\u2028na\u00efve \U0001f389\x00\x1b[2J\n".encode(), ["na\u00efve \U0001f389\x00\x1b[2J"]),
    ],
    ids=["no UTF-8", "CRLF", "signs"],
)
def test_whatever_comes_on_standard_input_is_answered(written, heard):
    done = run_python(ECHO, "utf-8", written)
    assert done.returncode == 0, done.stderr
    replies = re.findall(r"empax> I heard (.*)\.\n", done.stdout.decode())
    assert replies == [repr(text) for text in heard]


FACT = {"head": "I won", "relation": "xReact", "tail": "happy", "words": "As a result, I feel happy."}
INTENTS = {"intent_first": "neutral", "intent_second": "wishing", "intent_prediction": "consoling"}


@pytest.mark.parametrize(
    ("about", "below"),
    [
        ({"notes": {"answered_by": "before"}}, ["[a fixed answer, not the model's]"]),
        ({"attributes": {"sentiment": "low"}}, ["[sentiment low]", "0.10 s"]),
        (
            {"attributes": {"sentiment": "low"}, "emotion_prediction": "sad"},
            ["[you seem sad; sentiment low]", "0.10 s"],
        ),
        ({"notes": {"facts": [FACT]}}, ["[-]", "knows: As a result, I feel happy. (xReact)", "0.10 s"]),
        (
            {"notes": {"reasons": [[1, 3, 11]], **INTENTS, "facts": []}},
            ["[-]", "reasons: My <em>dog died</em>.", "intents: neutral -> wishing -> consoling", "0.10 s"],
        ),
    ],
    ids=["fixed", "attributes", "feeling", "facts", "reasons and intents"],
)
def test_below_a_reply_stands_what_is_known_of_it(about, below):
    shown = chat.describe(Prediction(("Hi.", "My dog died."), "Oh.", reference="", **about), 0.1, 3)
    assert shown == "\n       ".join(["empax> Oh.", *below])


@pytest.mark.slow
def test_danger_gets_the_fixed_answer_and_the_conversation_goes_on(command, finished):
    said = "My dog died.\nI want to kill myself.\nHe was old.\n"
    result = command("-m", "empax.chat", f"--workdir={finished}", "--exemplars=0", input=said)
    assert result.returncode == 0, result.stderr
    turns = result.stdout.split("you> ")[1:]
    assert result.stdout.startswith("Messages that seem to speak of danger get a fixed answer with emergency numbers: ")
    assert [turn.startswith(f"empax> {ANSWER}") for turn in turns] == [False, True, False, False]
    assert turns[2].startswith("empax> ")
    without = command("-m", "empax.chat", f"--workdir={finished}", "--exemplars=0", "--nosafety", input=said)
    assert ANSWER not in without.stdout
    assert without.stdout.count("empax> ") == 3
