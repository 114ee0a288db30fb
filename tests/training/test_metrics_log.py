from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from empax.core.files import DataError, read_jsonl
from empax.training.metrics_log import EventFile, MetricsLog, ProgressBar


def test_rows_are_appended_and_readable_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, stage="generator") as log:
        log.write(5, "train", {"loss": 1.5})
        assert json.loads(path.read_text()) == {"stage": "generator", "step": 5, "split": "train", "loss": 1.5}


def test_a_full_disk_is_named_by_the_file_that_it_refuses(tmp_path):
    """What stays in a buffer is refused once more, when the file is closed."""
    rows, events = MetricsLog(tmp_path / "metrics.jsonl", stage="x"), EventFile(tmp_path / "board")
    rows.close()
    events.close()
    rows._file, events._file = Path("/dev/full").open("a"), Path("/dev/full").open("ab")  # noqa: SIM115
    for refused, name in (
        (lambda: rows.write(1, "train", {"loss": 1.0}), r"metrics\.jsonl"),
        (rows.close, r"metrics\.jsonl"),
        (lambda: events.log(1, {"loss": 1.0}), r"tfevents\.\d+"),
        (events.close, r"tfevents\.\d+"),
    ):
        with pytest.raises(DataError, match=rf"{name} cannot be written \(No space left on device\)"):
            refused()


def test_resuming_drops_what_will_come_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for stage in ("first", "second"):
        with MetricsLog(path, stage=stage) as log:
            for step in (2, 4, 6):
                log.write(step, "train", {"loss": float(step)})
    with path.open("a") as file:
        file.write('7\n{"stage": "second", "stdp": 6}\n{"stage": "second", "st')  # damaged; killed while writing
    with MetricsLog(path, stage="second", resume_step=4) as log:
        log.write(6, "train", {"loss": 7.0})
    rows = [(row["stage"], row["step"], row["loss"]) for row in read_jsonl(path)]
    assert rows[:3] == [("first", 2, 2), ("first", 4, 4), ("first", 6, 6)]
    assert rows[3:] == [("second", 2, 2), ("second", 4, 4), ("second", 6, 7)]
    with MetricsLog(path, stage="second"):
        pass
    assert [row["stage"] for row in read_jsonl(path)] == ["first"] * 3


def test_rows_of_a_checkpoint_replace_those_of_a_damaged_file(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, stage="first") as log:
        log.write(2, "train", {"loss": 0.0})
    with MetricsLog(path, stage="second") as log:
        log.write(2, "train", {"loss": 1.0, "bleu": float("nan")})
        log.write(4, "train", {"loss": 2.0})
        saved = list(log.rows)
        log.write(6, "train", {"loss": 3.0})
    assert json.loads(saved[0])["bleu"] is None  # JSON has no nan
    whole = path.read_text().splitlines()
    with MetricsLog(path, stage="second", resume_step=4, rows=saved) as log:
        assert log.rows == saved
    assert path.read_text().splitlines() == whole[:-1]
    assert not caplog.records
    path.write_text(path.read_text().replace("2.0", "9.0"))
    with MetricsLog(path, stage="second", resume_step=4, rows=saved):
        pass
    assert path.read_text().splitlines() == whole[:-1]
    assert "restoring its rows from the checkpoint" in caplog.text


@pytest.mark.oracle
def test_event_files_are_those_of_tensorboard(tmp_path):
    """Parsed with tensorboardX's message classes, checksums compared with its own."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    from tensorboardX.record_writer import masked_crc32c

    with MetricsLog(tmp_path / "m.jsonl", stage="s", resume_step=127, tensorboard=tmp_path / "board") as log:
        log.write(128, "train", {"loss": 0.25, "accuracy": -3.5})
    (path,) = (tmp_path / "board").iterdir()
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        assert data[8:12] == struct.pack("<I", masked_crc32c(data[:8]))
        assert data[12 + length : 16 + length] == struct.pack("<I", masked_crc32c(event))
        events.append(event_pb2.Event.FromString(event))
        data = data[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    assert (events[1].session_log.status, events[1].step) == (1, 128)  # of more than seven bits
    scalars = [(event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) for event in events[2:]]
    assert scalars == [(128, "train/loss", 0.25), (128, "train/accuracy", -3.5)]
    assert all(event.wall_time > 1e9 for event in events)


def test_each_run_has_its_own_event_file(tmp_path):
    for _ in range(2):
        EventFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_bar_shows_time_left_and_speed(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = ProgressBar("generator", steps=4, initial=1)
    bar.show(loss=2.0, examples_per_second=31.25)
    bar.advance()
    bar.close()
    shown = capsys.readouterr().err
    assert "generator" in shown
    assert "2/4" in shown
    assert "31.25 examples/s" in shown
    quiet = capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    ProgressBar("generator", steps=4, initial=1).close()
    assert quiet.err == capsys.readouterr().err == ""
