"""No text of others commands a terminal or a page."""

import pytest

from empax.core.files import DataError, message_of
from empax.core.text_files import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\u241b[31mred\u241b[0m"),
        ("a\0b\x7f\x9b2J", "a\u2400b\u2421\ufffd2J"),
        ("over\rwritten\x08\x07", "over\u240dwritten\u2408\u2407"),
        ("two\nlines\tand é, 你好, \U0001f642", "two\nlines\tand é, 你好, \U0001f642"),
    ],
)
def test_control_characters_are_signs(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize("error", [DataError("file \x1b[2J is bad"), FileNotFoundError(2, "gone", "\x1b[2J")])
def test_messages_of_commands_have_none(error):
    assert "\x1b" not in message_of(error)
    assert "\u241b[2J" in message_of(error)
