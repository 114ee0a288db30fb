"""One writer in a work directory; who it is, and what a dead one leaves."""

import errno
import json
import os
import subprocess
import sys

import pytest

from empax.core import lock
from empax.core.config import ConfigError
from empax.core.files import WorkDir
from empax.core.lock import holder, writing

HOLD = """
import sys
from pathlib import Path
from empax.core.files import WorkDir
from empax.core.lock import writing

with writing(WorkDir(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_second_writer_is_told_who_holds_it_since_when(tmp_path, other):
    files = WorkDir(tmp_path)
    expected = rf"is in use: process {other.pid} on .*, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d .*--workdir"
    for _ in range(2):
        with pytest.raises(ConfigError, match=expected), writing(files):
            pass
    assert str(other.pid) in holder(files)


def test_a_dead_writers_lock_is_taken_over_and_a_living_ones_is_not(tmp_path, other):
    files = WorkDir(tmp_path)
    advice = "is in use: .* is running in it. Wait until it has finished, end it, or choose another --workdir"
    with pytest.raises(ConfigError, match=advice), writing(files):
        pass
    files.lock.write_text("[]")  # whoever it is
    assert holder(files) == "another process"
    other.kill()
    other.wait()
    assert files.lock.exists()
    assert holder(files) == ""
    with writing(files):
        assert json.loads(files.lock.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "), writing(files):
            pass
    assert not files.lock.exists()
    assert holder(files) == ""


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with writing(WorkDir(tmp_path)):
        assert "has no locks: nothing keeps a second run out" in caplog.text
        assert holder(WorkDir(tmp_path)) == ""


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--workdir=.*file cannot be written"), writing(WorkDir(tmp_path / "file")):
        pass
