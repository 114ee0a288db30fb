"""What a stage reads from outside, and that its contents decide whether it is the same."""

import hashlib
import os

import pytest

from empax.core import inputs
from empax.core.inputs import Input, digest, note, note_known, noting

pytestmark = pytest.mark.usefixtures("own_cache")


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write(path, text, *, age=100):
    """A file that was changed so many seconds ago, as far as its own times say it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    return path


def test_files_are_noted_by_name_and_contents_and_only_within(tmp_path):
    file = write(tmp_path / "a.txt", "one")
    folder = write(tmp_path / "model" / "deep" / "weights.bin", "two").parents[1]
    write(folder / ".git" / "HEAD", "hidden")
    write(folder / "README.md", "to be read")
    note("nothing", file)
    with noting() as found:
        note("a file", file)
        note("a folder", folder)
        note("some files", tmp_path, [file])
        note_known("a download", "https://a", sha("three"))
        note("what is not there", tmp_path / "nowhere")
    note("nothing", file)
    assert found == {
        "a file": Input(str(file), {"": sha("one")}),
        "a folder": Input(str(folder), {"deep/weights.bin": sha("two")}),
        "some files": Input(str(tmp_path), {"a.txt": sha("one")}),
        "a download": Input("https://a", {"": sha("three")}),
        "what is not there": Input(str(tmp_path / "nowhere"), {}),
    }


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (Input("A", {"x": "1", "y": "2"}), ""),
        (Input("B", {"x": "1", "y": "2"}), ""),
        (Input("A", {"x": "1", "y": "3"}), "A has changed (y)"),
        (Input("A", {"x": "1"}), "A has changed (y)"),
        (Input("A", {"x": "1", "y": "2", "z": "4"}), "A has changed (z)"),
        (Input("B", {"a": "1", "b": "2"}), "B is not what A was (a, b, x, ...)"),
    ],
)
def test_contents_and_names_decide_and_the_place_does_not(now, words):
    assert Input("A", {"x": "1", "y": "2"}).difference(now) == words
    assert Input("A", {"": "1"}).difference(Input("A", {"": "2"})) == "A has changed"


def test_a_large_file_is_read_once_as_long_as_nobody_touches_it(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_REMEMBERED_BYTES", 1)
    monkeypatch.setattr(inputs, "_SETTLED_NS", -1)  # the times of change cannot be set back
    file = write(tmp_path / "a.txt", "one")
    assert digest(file) == sha("one")
    with monkeypatch.context() as patched:
        patched.setattr(inputs, "hash_file", lambda _: pytest.fail("read again"))
        assert digest(file) == sha("one")
    about = file.stat()
    file.write_text("two")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # same size, same time of change as far as it says
    assert digest(file) == sha("two")
    kept = next((tmp_path / "cache" / "digests").iterdir())
    kept.write_text(kept.read_text().replace(sha("two"), sha("one")))
    assert digest(file) == sha("two")


def test_a_file_that_was_changed_just_now_is_not_remembered(tmp_path, monkeypatch):
    """Its next change may leave it with the same times."""
    monkeypatch.setattr(inputs, "_REMEMBERED_BYTES", 1)
    assert digest(write(tmp_path / "a.txt", "one")) == sha("one")
    assert not (tmp_path / "cache").exists()
