"""Texts of others on a terminal or a page: what would command either is shown as a sign."""

from __future__ import annotations

_SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_SIGNS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with its control characters, but tabs and ends of lines, as signs: ESC as U+241B, NUL as U+2400."""
    return text.translate(_SIGNS)
