"""`~` in paths, and folders that cannot be written to."""

import os
from pathlib import Path

import pytest

from empax.core.config import ConfigError
from empax.core.paths import check_folder, expand, given_folder
from empax.core.recipe import load_recipe
from empax.core.settings import cache_dir
from empax.data import dailydialog, empathetic_dialogues, epitome, own
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.huggingface import resolve


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EMPAX_DATA_DIR", raising=False)
    return tmp_path


def test_the_home_folder_takes_the_place_of_its_sign(home):
    assert expand("~/runs/a") == home / "runs" / "a"
    assert expand(Path("~")) == home
    assert expand("runs/~a") == Path("runs/~a")
    with pytest.raises(ConfigError, match="begins with the home folder of an unknown user"):
        expand("~nobody-of-this-name/runs")


def test_every_setting_that_is_a_path_may_begin_so(home, monkeypatch):
    (home / "data").mkdir()
    (home / "recipe.py").write_text("def get_config():\n    return 7\n")
    assert load_recipe("~/recipe.py") == 7
    monkeypatch.setenv("EMPAX_CACHE_DIR", "~/cache")
    assert cache_dir() == home / "cache"
    monkeypatch.delenv("EMPAX_CACHE_DIR")
    assert cache_dir() == home / ".cache" / "empax"
    for name in ("dialogues_test.txt", *epitome.FILES.values(), empathetic_dialogues.ARCHIVE_NAME):
        (home / "data" / name).touch()
    for split in own.SPLITS:
        (home / "data" / f"{split}.jsonl").write_text("{}\n")
    assert dailydialog.find_dailydialog("~/data") == home / "data" / "dialogues_test.txt"
    assert epitome.find_epitome("~/data") == home / "data"
    assert own.find_files("~/data")["test"] == [home / "data" / "test.jsonl"]
    assert empathetic_dialogues.find_archive("~/data").parent == home / "data"
    monkeypatch.setenv("EMPAX_DATA_DIR", "~/data")
    assert epitome.find_epitome() == home / "data"
    assert empathetic_dialogues.find_archive().parent == home / "data"
    assert resolve("~/data") == home / "data"
    with pytest.raises(ConfigError, match=str(home / "data")):
        load_tokenizer("~/data")


def test_a_folder_that_takes_no_files_is_refused_before_work(tmp_path, monkeypatch):
    check_folder(tmp_path, "--output")
    check_folder(tmp_path / "new" / "folder", "--output")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=rf"--output={file} is not a folder"):
        check_folder(file, "--output")
    with pytest.raises(ConfigError, match=rf"--workdir={file}/a/b: {file} is not a folder"):
        check_folder(file / "a" / "b", "--workdir")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="gone is not a folder"):
        check_folder(tmp_path / "gone", "--output")
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    with pytest.raises(ConfigError, match=f"--output={tmp_path}/new: {tmp_path} is not writable; choose"):
        check_folder(tmp_path / "new", "--output")


@pytest.mark.parametrize("path", ["", None, 3, ["runs"], b""])
def test_what_is_no_path_of_a_folder_is_named(path, home):
    with pytest.raises(ConfigError, match=r"workdir = .* must be the path of a folder"):
        given_folder(path, "workdir")
    for wrong in ("a\0b", *([] if isinstance(path, (str, bytes)) else [path])):
        with pytest.raises(ConfigError, match="is not a path"):
            expand(wrong)
    assert given_folder("~/run", "workdir") == given_folder(home / "run", "workdir") == home / "run"
