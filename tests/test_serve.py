"""The command that serves: what it refuses before it loads anything."""

import pytest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one", "two"], "error: name one model or run, such as: empax serve empathetic-t5-small"),
        (
            ["x", "--host=0.0.0.0"],
            "error: --host=0.0.0.0 is open to others; set EMPAX_TOKEN, or take --host=127",
        ),
        (["no/such/model"], "error: "),
    ],
)
def test_what_cannot_be_served_is_one_line(words, said, command):
    ran = command("-m", "empax", "serve", *words)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith(said)
