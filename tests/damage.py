"""Four ways in which a file is damaged."""

from pathlib import Path

HOW = ("cut", "flipped", "deleted", "emptied")


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "flipped":
        place = len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else b"")
