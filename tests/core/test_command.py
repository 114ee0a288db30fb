"""What commands say of errors, and how they end."""

import os
import subprocess
import sys

import pytest

from empax.core.command import in_one_line
from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.training.accumulation import NonFiniteError
from empax.training.checkpoint import CheckpointError

ERRORS = {
    "a = 1": (ConfigError("a = 1"), DataError("a = 1"), CheckpointError("a = 1"), NonFiniteError("a = 1")),
    "a.txt: No such file.": (FileNotFoundError(2, "No such file", "a.txt"),),
}

STOPPED = """
import os
from empax.core.command import in_one_line, run_command

@in_one_line
def main(argv):
    {}

run_command(main, __name__)
"""
CLOSED = "read, write = os.pipe(); os.close(read); os.dup2(write, 1); print('to nobody')"


@pytest.mark.parametrize(("said", "error"), [(said, error) for said, errors in ERRORS.items() for error in errors])
def test_what_the_user_can_mend_is_said_in_one_line(said, error, capsys):
    @in_one_line
    def main(argv):
        if len(argv) == 2:
            raise error
        return len(argv)

    assert main(["x", "y"]) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert main(["x"]) == 1


def test_a_mistake_of_the_code_is_no_such_error():
    @in_one_line
    def main():
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        main()


@pytest.mark.parametrize(
    ("body", "code", "said"), [("raise KeyboardInterrupt", 130, "\ninterrupted\n"), (CLOSED, 141, "")]
)
def test_ctrl_c_is_one_line_and_an_output_that_nobody_reads_none(command, body, code, said):
    ran = command("-c", STOPPED.format(body))
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", said)


def test_a_terminal_that_cannot_show_a_letter_shows_another():
    program, ascii_alone = STOPPED.format("print('caf\u00e9 \U0001f389')"), {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ascii_alone)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "caf? ?\n", "")
