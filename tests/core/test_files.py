from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from empax.core.files import (
    DataError,
    hash_file,
    hash_json,
    is_temporary,
    message_of,
    read_json,
    read_jsonl,
    replacing,
    write_json,
    write_jsonl,
    write_text,
    write_together,
)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(DataError, match=r"a\.txt cannot be written \(disk full\)\.$"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_file_is_replaced_and_never_written_in_place(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with path.open() as reader:  # somebody is reading what is there
        with replacing(path) as temporary:
            temporary.write_text("new")
            assert path.read_text() == "old"
        assert reader.read() == "old"
    assert temporary.parent == tmp_path  # a rename within one file system
    assert temporary.suffix == ".txt"
    assert is_temporary(temporary)
    assert not is_temporary(path)
    assert path.read_text() == "new"


def test_file_and_name_are_on_disk_before_it_returns(tmp_path, monkeypatch):
    """In this order: the contents, the new name, the folder that holds the name."""
    path, calls = tmp_path / "a.txt", []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(descriptor):
        about = os.fstat(descriptor)
        calls.append("folder" if stat.S_ISDIR(about.st_mode) else f"{about.st_size} bytes")
        real["fsync"](descriptor)

    def replace(source, target):
        calls.append("renamed")
        real["replace"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_text(path, "12345")
    assert calls == ["5 bytes", "renamed", "folder"]


def test_json_round_trip_of_what_settings_hold(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"n": np.float32(0.5), "path": Path("x/y"), "text": "ü"})
    assert path.read_text(encoding="utf-8") == '{\n  "n": 0.5,\n  "path": "x/y",\n  "text": "ü"\n}\n'
    assert read_json(path) == {"n": 0.5, "path": "x/y", "text": "ü"}


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    parts: tuple[int, ...]


def test_jsonl_round_trip_skips_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [Row("ä", (1, 2)), {"name": "b"}])
    assert path.read_text(encoding="utf-8") == '{"name": "ä", "parts": [1, 2]}\n{"name": "b"}\n'
    path.write_text(path.read_text(encoding="utf-8") + "\n\n", encoding="utf-8")
    assert list(read_jsonl(path)) == [{"name": "ä", "parts": [1, 2]}, {"name": "b"}]


@pytest.mark.parametrize(
    ("line", "reason"), [("{broken", "not valid JSON"), ("[1]", "must be a JSON object, not a list")]
)
def test_a_bad_line_is_named_by_its_number_counting_blank_ones(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n')
    rows = read_jsonl(path)
    assert next(rows) == {"a": 1}
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: {reason}"):
        next(rows)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -np.float64("inf")])
def test_json_has_no_word_for_what_is_no_number(tmp_path, number):
    write_json(tmp_path / "a.json", {"a": [1.5, number], "b": Row("x", (number,))})
    assert read_json(tmp_path / "a.json") == {"a": [1.5, None], "b": {"name": "x", "parts": [None]}}
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 cannot be written: it holds nan or infinity"):
        write_jsonl(tmp_path / "a.jsonl", [{"a": 1.0}, {"a": number}])
    assert not (tmp_path / "a.jsonl").exists()


def test_files_are_written_together_or_not_at_all(tmp_path):
    write_together(tmp_path / "new", {"a": "ü", "b": "2", "c": "3"})
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()} == {
        "a": "ü", "b": "2", "c": "3",
    }  # fmt: skip
    with pytest.raises(UnicodeEncodeError):
        write_together(tmp_path / "half", {"a": "1", "b": "\ud83d"})
    assert not (tmp_path / "half").exists()
    (tmp_path / "new" / "c").unlink()
    (tmp_path / "new" / "c").mkdir()
    with pytest.raises(DataError, match="Is a directory"):
        write_together(tmp_path / "new", {"a": "4", "b": "5", "c": "6"})
    assert (tmp_path / "new" / "a").read_text(encoding="utf-8") == "ü"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a", "b", "c"]


def test_hashes_depend_on_content_alone(tmp_path):
    assert hash_json({"a": 1, "b": (2, 3)}) == hash_json({"b": [2, 3], "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})
    # Work directories hold such hashes: another one would make them stale.
    assert (hash_json({"a": 1, "b": (2, 3)}), hash_json({"ü": None})) == ("fd28b17488e0d3ec", "82c8b3528d56d8c1")
    (tmp_path / "f").write_bytes(b"abc")
    assert hash_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_what_the_system_refuses_to_write_is_one_line_with_file_and_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/a\.json cannot be written \(.*file: File exists\)\.$"):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(DataError, match=r"cannot be written \(File name too long\)"):
        write_text(tmp_path / ("x" * 300), "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder cannot be written \(Is a directory\)"):
        write_jsonl(tmp_path / "folder", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_the_words_of_a_command_for_an_error():
    assert message_of(DataError("a.json is empty.")) == "a.json is empty."
    assert message_of(PermissionError(errno.EACCES, "Permission denied", "/x/y")) == "/x/y: Permission denied."
    renamed = OSError(errno.EXDEV, "Invalid cross-device link", "/x", None, "/y")
    assert message_of(renamed) == "/x, /y: Invalid cross-device link."
    assert message_of(OSError(errno.ENOSPC, "No space left on device")) == "OSError: No space left on device."


def test_the_file_that_another_could_not_be_made_from_is_named(tmp_path):
    expected = r"a\.txt cannot be written \(.*source/gone: No such file or directory\)"
    with pytest.raises(DataError, match=expected), replacing(tmp_path / "a.txt"):
        (tmp_path / "source" / "gone").read_text()
