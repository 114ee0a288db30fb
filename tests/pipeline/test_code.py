"""The commit of empax's own source, and of no repository that merely surrounds it."""

import shutil
import subprocess

import pytest

from empax.pipeline.code import commit


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "empax"\n')
    git(tmp_path, "init")
    git(tmp_path, "add", "pyproject.toml")
    git(tmp_path, "commit", "-m", "begin")
    return tmp_path


def test_it_is_that_of_the_source_tree_with_a_mark_if_that_has_changes(repository, monkeypatch):
    clean = commit(repository)
    assert clean
    assert set(clean) <= set("0123456789abcdef")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    assert commit(repository) == clean
    (repository / "pyproject.toml").write_text('[project]\nname = "empax"\nversion = "2"\n')
    assert commit(repository) == f"{clean}-dirty"


@pytest.mark.parametrize("text", ['[project]\nname = "mine"\n', "[tool]\n", "not = toml ="])
def test_another_projects_commit_does_not_count(repository, text):
    (repository / "pyproject.toml").write_text(text)
    assert commit(repository) is None


def test_a_repository_around_an_installed_package_does_not_count(repository):
    site = repository / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    assert commit(site) is None
    (site / "pyproject.toml").write_text('[project]\nname = "empax"\n')
    assert commit(site) is None
    shutil.rmtree(repository / ".git")
    assert commit(repository) is None
