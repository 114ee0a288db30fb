"""What is kept across runs: used while it is sound, made anew when it is not."""

import numpy as np
import pytest

from empax.core.cache import is_sound, kept_array, kept_rows, seal

ROWS = [{"id": "a", "level": "low"}, {"id": "b", "level": "high"}]


@pytest.mark.parametrize("how", ["cut", "flipped", "emptied", "checksum gone", "checksum flipped"])
def test_a_damaged_file_is_made_anew_and_then_kept(tmp_path, how, caplog):
    path, made = tmp_path / "cache" / "a.jsonl", []

    def make():
        made.append(1)
        return ROWS

    assert kept_rows(path, make) == kept_rows(path, make) == ROWS
    assert len(made) == 1
    mark = path.with_name("a.jsonl.sha256")
    data = path.read_bytes()
    if how == "checksum gone":
        mark.unlink()
    elif how == "checksum flipped":
        mark.write_bytes(b"\xff" + mark.read_bytes()[1:])
    else:
        path.write_bytes({"cut": data[: data.index(b"\n") + 1], "flipped": data.replace(b"low", b"lov")}.get(how, b""))
    assert kept_rows(path, make) == ROWS
    assert len(made) == 2
    assert f"{path} is damaged" in caplog.text
    assert kept_rows(path, make) == ROWS
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert kept_rows(tmp_path / "file" / "a.jsonl", lambda: ROWS) == ROWS
    assert "set EMPAX_CACHE_DIR to a writable folder" in caplog.text


def test_arrays_come_back_as_they_were(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(2):
        found = kept_array(tmp_path / "a.npy", lambda: array)
        np.testing.assert_array_equal(found, array)
        assert found.dtype == np.float32
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-4])
    np.testing.assert_array_equal(kept_array(tmp_path / "a.npy", lambda: array), array)


def test_a_folder_is_sound_with_exactly_its_files(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a").write_text("one")
    assert not is_sound(folder)
    seal(folder)
    assert is_sound(folder)
    (folder / "b").write_text("two")
    assert not is_sound(folder)
    (folder / "b").unlink()
    (folder / "a").write_text("onf")
    assert not is_sound(folder)
    assert not is_sound(tmp_path / "nothing")
