"""Every reader of text files against every kind of malformed file: read alike, or refused with file and line.

And no text of others commands a terminal or a page.
"""

import dataclasses
import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from empax.core import text_files
from empax.core.files import DataError, message_of, read_json, read_jsonl
from empax.core.text_files import parse_json, visible
from empax.data import dailydialog, empathetic_dialogues, epitome, own
from empax.data.dialogues import instance_from_row
from empax.evaluation.rows import read_predictions
from tests.own_corpus import archive_of

WORD = "café"  # in line 2 or 3 of every example


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader with a good file.

    Attributes:
      text: of the good file; WORD stands in its `line`.
      name: the file's.
      read: what it makes of a path, or a DataError.
      json: whether its lines are JSON objects.
    """

    text: str
    line: int
    name: str
    read: Callable[[Path], Any]
    json: bool = True


def predictions(path: Path) -> Any:
    rows, bad = read_predictions(path)
    if bad:
        raise DataError(f"{path}, {bad[0]}")
    return rows


def dialogues_of_an_archive(path: Path) -> Any:
    if not path.is_file():  # the file in the archive cannot be a folder or a pipe, the archive itself can
        return list(empathetic_dialogues.read_dialogues(path, "test"))
    archive = path.with_name("archive.tar.gz")
    archive.write_bytes(archive_of(path.read_bytes(), ["test"]))
    return list(empathetic_dialogues.read_dialogues(archive, "test"))


def pairs(path: Path) -> Any:
    good = READERS["epitome"].text
    for name in list(epitome.FILES.values())[1:]:
        (path.parent / name).write_text(good, encoding="utf-8")
    return epitome.load_epitome(path.parent)


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)


TURNS = ["I lost my dog.", f"Was it near the {WORD}?"]
READERS = {
    "predictions": Reader(
        lines(*({"context": [TURNS[0]], "response": text, "reference": TURNS[1]} for text in ("Oh no.", WORD))),
        line=1, name="rows.jsonl", read=predictions,
    ),
    "own": Reader(
        lines({"id": "a", "utterances": ["Hi.", "Hello."]}, {"id": "b", "utterances": TURNS}),
        line=2, name="train.jsonl", read=lambda path: list(own.read_file(path)),
    ),
    "instances": Reader(
        lines(*({"id": t, "context": [t], "response": t, "emotion": "", "notes": {}} for t in TURNS)),
        line=2, name="train.jsonl", read=lambda path: [instance_from_row(row) for row in read_jsonl(path)],
    ),
    "empathetic_dialogues": Reader(
        lines(
            "conv_id,utterance_idx,context,prompt,speaker_idx,utterance,selfeval,tags",
            *(f"c,{i},sad,My dog,{i},{text},5|5|5_2|2|5," for i, text in enumerate(TURNS, start=1)),
        ),
        line=3, name="test.csv", read=dialogues_of_an_archive, json=False,
    ),
    "epitome": Reader(
        lines("sp_id,rp_id,seeker_post,response_post,level,rationales", f'a,b,"{TURNS[0]}",{TURNS[1]},1,x'),
        line=2, name=epitome.FILES["emotional_reaction"], read=pairs, json=False,
    ),
    "dailydialog": Reader(
        lines("Hi . __eou__ Hello . __eou__", "".join(f"{text} __eou__ " for text in TURNS)),
        line=2, name="dialogues_test.txt", read=dailydialog.load_dialogues, json=False,
    ),
}  # fmt: skip

Change = Callable[[bytes], bytes]


def of_the_word(text: bytes) -> Change:
    return lambda raw: raw.replace(WORD.encode(), text, 1)


READ_ALIKE: dict[str, Change] = {
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "CR LF": lambda raw: raw.replace(b"\n", b"\r\n"),
    "byte order mark and CR LF": lambda raw: b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"),
    "no end of the last line": lambda raw: raw.removesuffix(b"\n"),
}

# What is wrong, and what the message says of it; "" = in line 1, whatever line holds the word.
REFUSED: dict[str, tuple[Change, str, bool]] = {
    "latin-1": (of_the_word(WORD.encode("latin-1")), "not UTF-8 (byte 0xe9", True),
    "half a character": (of_the_word(WORD.encode()[:-1]), "not UTF-8 (byte 0xc3", True),
    "surrogate in bytes": (of_the_word(b"\xed\xa0\xbd"), "not UTF-8 (byte 0xed", True),
    "NUL": (of_the_word(b"a\0b"), "a NUL byte", True),
    "carriage return": (of_the_word(b"a\rb"), "a carriage return", True),
    "200,000 characters": (of_the_word(b"w " * 100_000), "", True),
    "CR alone": (lambda raw: raw.replace(b"\n", b"\r"), "a carriage return", False),
    "UTF-16": (lambda raw: raw.decode().encode("utf-16"), "UTF-16, must be UTF-8", False),
    "UTF-16, no mark": (lambda raw: raw.replace(WORD.encode(), b"").decode().encode("utf-16-le"), "a NUL byte", False),
    "UTF-32": (lambda raw: raw.decode().encode("utf-32"), "UTF-32, must be UTF-8; save it as UTF-8", False),
}

REFUSED_JSON: dict[str, tuple[bytes, str]] = {
    "half a surrogate pair": (b'"nice \\ud83d"', "half of a surrogate pair"),
    "the other half": (b'"nice \\uDE00"', "half of a surrogate pair"),
    "nesting that recursion does not survive": (b"[" * 100_000 + b"]" * 100_000, "nested more than 64 deep"),
    "nesting that it survives": (b'{"a":' * 80 + b"1" + b"}" * 80, "nested more than 64 deep"),
    "5,000 digits": (b"9" * 5000, "a number of 5000 digits"),
    "65 bits": (b"18446744073709551616", "must fit in 64 bits"),
    "64 bits without a sign": (b"9223372036854775808", "must fit in 64 bits"),
    "65 lists": (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
    "NaN": (b"NaN", "NaN is not a JSON number"),
    "Infinity": (b"-Infinity", "-Infinity is not a JSON number"),
    "1e999": (b"1e999", "1e999 is too large"),
    "a quotation mark": (b'"a"b"', "not valid JSON"),
}


def written(reader: Reader, tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "folder" / reader.name
    path.parent.mkdir()
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("change", READ_ALIKE)
@pytest.mark.parametrize("name", READERS)
def test_what_differs_in_no_character_is_read_alike(tmp_path, name, change):
    reader = READERS[name]
    path = written(reader, tmp_path, reader.text.encode())
    expected = reader.read(path)
    assert WORD in repr(expected)
    path.write_bytes(READ_ALIKE[change](reader.text.encode()))
    assert reader.read(path) == expected


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("name", READERS)
def test_what_is_malformed_is_refused_with_file_and_line(tmp_path, name, change):
    reader = READERS[name]
    alter, says, in_line = REFUSED[change]
    path = written(reader, tmp_path, alter(reader.text.encode()))
    assert path.read_bytes() != reader.text.encode()
    line = reader.line if in_line else 1
    with pytest.raises(DataError, match=rf"{re.escape(reader.name)}, line {line}: .*{re.escape(says)}"):
        reader.read(path)


@pytest.mark.parametrize("change", REFUSED_JSON)
@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.json])
def test_what_json_has_no_word_for_is_refused_with_file_and_line(tmp_path, name, change):
    reader = READERS[name]
    value, says = REFUSED_JSON[change]
    *_, row = reader.text.splitlines()
    path = written(reader, tmp_path, (reader.text + row[:-1] + ', "more": ').encode() + value + b"}\n")
    with pytest.raises(DataError, match=rf"{re.escape(reader.name)}, line 3: .*{re.escape(says)}"):
        reader.read(path)


@pytest.mark.parametrize("name", [name for name in READERS if name != "predictions"])
def test_a_file_without_a_row_is_refused_or_gives_none(tmp_path, name):
    reader = READERS[name]
    path = written(reader, tmp_path, b"\n \n\n")
    if name == "instances":
        assert reader.read(path) == []
        return
    with pytest.raises(DataError, match=rf"{re.escape(reader.name)}, line [1-4]: "):
        reader.read(path)


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    reader = READERS[name]
    path = written(reader, tmp_path, b"")
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # nobody writes to it: reading would wait for ever
    with pytest.raises(DataError, match=re.escape(str(path))):
        reader.read(path)


DAMAGE: dict[str, Change] = {
    "checksum": lambda raw: raw[:-8] + bytes([raw[-8] ^ 1]) + raw[-7:],
    "length": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "cut in its end": lambda raw: raw[:-5],
    "cut in its middle": lambda raw: raw[: len(raw) // 2],
    "flipped bit": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 8]) + raw[len(raw) // 2 + 1 :],
    "more behind it": lambda raw: raw + b"garbage",
    "nothing": lambda raw: raw[:0],
    "not gzip": lambda raw: b"plain" + raw,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["predictions", "instances", "empathetic_dialogues"])
def test_a_damaged_gzip_file_is_refused_as_a_whole(tmp_path, name, damage):
    path = tmp_path / "rows.jsonl.gz"
    read = READERS[name].read
    if name == "empathetic_dialogues":
        (tmp_path / "good.csv").write_text(READERS[name].text, encoding="utf-8")
        dialogues_of_an_archive(tmp_path / "good.csv")
        path = tmp_path / "archive.tar.gz"
        read = lambda path: list(empathetic_dialogues.read_dialogues(path, "test"))  # noqa: E731
    else:
        path.write_bytes(gzip.compress(READERS[name].text.encode()))
    if name == "instances" and damage == "nothing":
        return  # no byte is no row, in a file without gzip too
    assert WORD in repr(read(path))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    if name == "predictions" and damage == "nothing":
        assert read(path) == []
        return
    with pytest.raises(DataError, match=re.escape(str(path))):
        read(path)


def test_bad_lines_do_not_hide_the_others(tmp_path):
    good = READERS["predictions"].text.splitlines()[0].encode()
    bad = [alter(good) for alter, _, in_line in REFUSED.values() if in_line]
    bad += [good[:-1] + b', "more": ' + value + b"}" for value, _ in REFUSED_JSON.values()]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line for pair in zip(bad, [good] * len(bad), strict=True) for line in pair) + b"\n")
    rows, named = read_predictions(path)
    assert len(rows) == len(bad) == len(REFUSED_JSON) + 6
    assert [line.number for line in named] == list(range(1, 2 * len(bad), 2))


@pytest.mark.parametrize("change", [*READ_ALIKE, *sorted(set(REFUSED) - {"CR alone", "carriage return"})])
def test_json_files_of_a_run_are_read_alike_or_refused(tmp_path, change):
    path = tmp_path / "config.json"
    raw = json.dumps({"a": 1, "b": [WORD]}, indent=1, ensure_ascii=False).encode() + b"\n"
    if change in READ_ALIKE:
        path.write_bytes(READ_ALIKE[change](raw))
        assert read_json(path) == {"a": 1, "b": [WORD]}
        return
    alter, says, in_line = REFUSED[change]
    path.write_bytes(alter(raw))
    if change == "200,000 characters":
        return  # a chat template may be long
    with pytest.raises(DataError, match=rf"config\.json, line {4 if in_line else 1}: .*{re.escape(says)}"):
        read_json(path)


CUT_SHORT = [(b"", "not valid JSON"), (b'{"n": ', "not valid JSON"), (b"[" * 100_000, "nested more than 64 deep")]


@pytest.mark.parametrize(
    ("raw", "says"), [*((b'{"a": ' + value + b"}", says) for value, says in REFUSED_JSON.values()), *CUT_SHORT]
)
def test_json_files_of_a_run_hold_json(tmp_path, raw, says):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"config\.json: .*{re.escape(says)}"):
        read_json(path)


@pytest.mark.parametrize(
    "text", ["9223372036854775807", "-9223372036854775807", "[" * 64 + "]" * 64, '"\\ud83d\\ude00"']
)
def test_what_is_just_allowed_is_read(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(("raw", "says"), [(b"\n\xff", "UTF-8"), (b"\n\0", "a NUL byte")])
def test_an_empty_first_line_counts(raw, says):
    with pytest.raises(DataError, match=rf"^x, line 2: .*{says}"):
        text_files.decode(raw, "x")


def test_the_bounds_are_the_last_that_are_taken(tmp_path, monkeypatch):
    assert (text_files.MAX_LINE_BYTES, text_files.MAX_FILE_BYTES, text_files.MAX_DEPTH) == (2**26, 2**30, 64)
    assert text_files.parse_object(json.dumps({"a": "x" * 100_000})) == {"a": "x" * 100_000}
    with pytest.raises(DataError, match="a text of 100001 characters; at most 100000"):
        text_files.parse_object(json.dumps({"a": "x" * 100_001}))
    path, most = tmp_path / "a.txt", 3 << 20
    path.write_bytes(b"abc\n" + b"x" * (most - 1) + b"\n")
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", most)
    assert [(number, len(line)) for number, line in text_files.read_lines(path)] == [(1, 3), (2, most - 1)]
    monkeypatch.setattr(text_files, "MAX_FILE_BYTES", most + 4)
    assert len(text_files.read_text(path)) == most + 4
    path.write_bytes(b"abc\n" + b"x" * most + b"\n")
    with pytest.raises(DataError, match="line 2: more than 3 MiB"):
        list(text_files.read_lines(path))
    with pytest.raises(DataError, match="holds more than 3 MiB"):
        text_files.read_text(path)


def test_a_gzip_file_that_expands_unlike_text_is_refused_and_unpacked_it_is_read(tmp_path, monkeypatch):
    assert text_files.MAX_EXPANSION == 200
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1000)
    path, plain = tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl"
    rows = b"{}\n" * 400_000
    plain.write_bytes(rows)
    path.write_bytes(gzip.compress(rows))
    assert len(rows) > 200 * path.stat().st_size
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line \d+: more than 200 times the size of the file.*unpack it"):
        list(read_jsonl(path))
    assert sum(1 for _ in read_jsonl(plain)) == 400_000
    path.write_bytes(gzip.compress(b"{}\n" * 333))  # the first MAX_LINE_BYTES are read whatever the size
    monkeypatch.setattr(text_files, "MAX_EXPANSION", 1)
    assert sum(1 for _ in read_jsonl(path)) == 333


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\u241b[31mred\u241b[0m"),
        ("a\0b\x1f\x7f\x80\x9f2J", "a\u2400b\u241f\u2421\ufffd\ufffd2J"),
        ("over\rwritten\x08\x07", "over\u240dwritten\u2408\u2407"),
        ("two\nlines\tand\xa0é, 你好, \U0001f642", "two\nlines\tand\xa0é, 你好, \U0001f642"),
    ],
)
def test_control_characters_are_signs(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize("error", [DataError("file \x1b[2J is bad"), FileNotFoundError(2, "gone", "\x1b[2J")])
def test_messages_of_commands_have_none(error):
    assert "\x1b" not in message_of(error)
    assert "\u241b[2J" in message_of(error)
