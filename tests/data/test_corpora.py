"""Where corpora are that a user has downloaded."""

import re

import pytest

from empax.core.config import ConfigError
from empax.data.corpora import find_corpus
from empax.data.dailydialog import find_dailydialog
from empax.data.epitome import FILES, find_epitome
from empax.data.spans import find_causes

pytestmark = pytest.mark.usefixtures("no_data_dir")

CORPORA = {
    "DailyDialog": (lambda *given: find_dailydialog(*given).parent, "dailydialog", ["dialogues_test.txt"]),
    "EPITOME": (find_epitome, "empathy_mental_health", FILES.values()),
    "RECCON": (find_causes, "emotion_causes", ["reccon_dailydialog_train.json"]),
}


@pytest.mark.parametrize("name", CORPORA)
def test_each_corpus_is_found_where_the_user_points(name, tmp_path, monkeypatch):
    find, folder, files = CORPORA[name]
    with pytest.raises(ConfigError, match=f"{name} is not downloaded automatically"):
        find("")
    with pytest.raises(ConfigError, match=rf"config\.data\.dir = .* holds no {name}"):
        find(tmp_path)
    own = tmp_path / folder
    own.mkdir()
    for file in files:
        (own / file).touch()
    assert find(tmp_path) == find(str(own)) == own
    monkeypatch.setenv("EMPAX_DATA_DIR", str(tmp_path))
    assert find() == own


def test_an_absent_corpus_is_named_with_its_files_and_with_where_the_folder_was_given(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^Songs is not downloaded automatically: set .* EMPAX_DATA_DIR to"):
        find_corpus("Songs", ["a.txt"], "songs")
    (tmp_path / "a.txt").write_text("la\n")
    lacks = "holds no Songs; set it to the folder with a.txt, b.txt, or to one that holds them under songs/"
    with pytest.raises(ConfigError, match=re.escape(f"config.data.dir = {str(tmp_path)!r} {lacks}")):
        find_corpus("Songs", ["a.txt", "b.txt"], "songs", str(tmp_path))
    monkeypatch.setenv("EMPAX_DATA_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^EMPAX_DATA_DIR = "):
        find_corpus("Songs", ["b.txt"], "songs")
