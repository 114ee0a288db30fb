"""One writer in a work directory; who it is, and what a dead one leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("supported", [True, False])
def test_a_dead_writers_lock_is_taken_over_and_a_living_ones_is_not(tmp_path, other, supported, monkeypatch):
    """Also where the file system has no locks: then the file says whose it is."""
    files = WorkDir(tmp_path)
    if not supported:
        monkeypatch.setattr(lock.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    with pytest.raises(ConfigError, match="is in use"), writing(files):
        pass
    other.kill()
    other.wait()
    assert files.lock.exists()
    assert holder(files) == ""
    with writing(files):
        assert json.loads(files.lock.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "), writing(files):
            pass
    assert not files.lock.exists()


def test_a_process_of_the_same_number_after_a_reboot_is_another(tmp_path):
    files = WorkDir(tmp_path / "runs" / "one")
    with writing(files):
        about = json.loads(files.lock.read_text())
    assert about["started"].isdecimal() == Path("/proc/self/stat").exists()
    for changed in ({"boot": "an earlier one"}, {"started": "1"}):
        files.lock.write_text(json.dumps(about | changed))
        assert holder(files) == ""
    files.lock.write_text(json.dumps(about | {"host": "elsewhere"}))
    assert "on elsewhere" in holder(files)
    with writing(files):  # the kernel knows better
        pass
    for damaged in ("", "[]", '{"pid": 1}'):
        files.lock.write_text(damaged)
        assert holder(files) == ""


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--workdir=.*file cannot be written"), writing(WorkDir(tmp_path / "file")):
        pass
