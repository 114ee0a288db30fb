"""The archive: where it is found, what is refused, and that TFDS gives back what was in it."""

import hashlib
import subprocess
import sys
import textwrap
import urllib.error

import pytest

from empax.core.files import DataError
from empax.core.types import Utterance
from empax.data import empathetic_dialogues
from empax.data.empathetic_dialogues import ARCHIVE_NAME, archive_hash, find_archive, load_dialogues, read_dialogues
from tests.own_corpus import HEADER, archive_of

pytestmark = pytest.mark.usefixtures("no_data_dir", "own_cache")

TRAIN = [
    # Nine columns, worker numbers, out of order, a lone quote that CSV quoting would stumble over.
    'hit:1_conv:2,1,afraid,I_comma_ alone at night,17, He said "hello_comma_ you,5|5|5_2|2|5,,cand one|cand two',
    "hit:1_conv:2,3,afraid,I_comma_ alone at night,17,Yes_comma_ very.,5|5|5_2|2|5,,",
    "hit:1_conv:2,2,afraid,I_comma_ alone at night,40,Were you scared?,5|5|5_2|2|5,,",
    # Eight columns; a line separator that only splitlines would see.
    "hit:0_conv:1,1,proud,My dog,3,He learned\u2028 to sit.,,",
    "hit:0_conv:1,2,proud,My dog,4,Good boy!,,",
]


def write_archive(folder, rows=TRAIN, header=HEADER):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ARCHIVE_NAME
    other = f"{header}hit:9_conv:9,1,sad,Rain,0,It rains.,,\n"
    path.write_bytes(archive_of((header + "".join(f"{row}\n" for row in rows)).encode(), valid=other.encode()))
    return path


def test_round_trip_through_tfds(tmp_path):
    write_archive(tmp_path / "data")
    splits = load_dialogues(tmp_path / "data")
    assert list(splits) == ["train", "validation", "test"]
    first, second = splits["train"]
    assert (first.id, first.emotion, first.situation) == ("hit:1_conv:2", "afraid", "I, alone at night")
    assert first.utterances == (
        Utterance("speaker", 'He said "hello, you'),
        Utterance("listener", "Were you scared?"),
        Utterance("speaker", "Yes, very."),
    )
    assert second.id == "hit:0_conv:1"  # the archive's order, not the ids'
    assert second.utterances[0].text == "He learned\u2028 to sit."
    assert splits["test"] == splits["train"]
    assert [d.emotion for d in splits["validation"]] == ["sad"]


def test_training_and_validation_have_single_blanks_and_test_rows_stay(tmp_path):
    rows = "c,1,sad,It  rained,0,Rain_comma_   again.,,\nc,2,sad,It  rained,0,Oh no.  How sad\u2028 !,,\n"
    path = tmp_path / ARCHIVE_NAME
    path.write_bytes(archive_of((HEADER + rows).encode()))
    splits = load_dialogues(path)
    (learnt,), (asked,) = splits["train"], splits["test"]
    assert splits["validation"] == [learnt]
    assert [learnt.situation, *(u.text for u in learnt.utterances)] == [
        "It rained", "Rain, again.", "Oh no. How sad\u2028 !"
    ]  # fmt: skip
    assert [asked.situation, *(u.text for u in asked.utterances)] == [
        "It  rained", "Rain,   again.", "Oh no.  How sad\u2028 !"
    ]  # fmt: skip


def test_prepared_once_and_anew_for_another_archive_in_its_order(tmp_path, monkeypatch):
    names = [f"hit:{i * 7 % 30}" for i in range(30)]
    write_archive(tmp_path / "data", [f"{name},1,sad,Rain,0,It rains.,," for name in names])
    before = load_dialogues(tmp_path / "data")
    assert [d.id for d in before["train"]] == names
    calls = []
    read = empathetic_dialogues.read_dialogues
    monkeypatch.setattr(empathetic_dialogues, "read_dialogues", lambda *args: calls.append(args) or read(*args))
    assert load_dialogues(tmp_path / "data") == before
    assert not calls
    write_archive(tmp_path / "data", TRAIN[3:])
    assert len(load_dialogues(tmp_path / "data")["train"]) == 1
    assert len(calls) == 3
    # Nothing but the two prepared folders is left behind.
    assert len(list((tmp_path / "cache" / "tfds").iterdir())) == 2


def test_tensorflow_and_torch_stay_out(tmp_path):
    write_archive(tmp_path / "data")
    code = f"""
        import sys
        from empax.data.empathetic_dialogues import load_dialogues
        assert len(load_dialogues({str(tmp_path / "data")!r})["train"]) == 2
        found = [name for name in ("tensorflow", "torch", "transformers") if name in sys.modules]
        assert not found, found
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_archive_is_found_where_the_user_points(tmp_path, monkeypatch):
    flat = write_archive(tmp_path / "flat")
    nested = write_archive(tmp_path / "nested" / "empathetic_dialogues", TRAIN[3:])
    assert find_archive(tmp_path / "flat") == flat
    assert find_archive(str(flat)) == flat
    assert find_archive(tmp_path / "nested") == nested
    monkeypatch.setenv("EMPAX_DATA_DIR", str(tmp_path / "nested"))
    assert find_archive() == nested
    assert find_archive(tmp_path / "flat") == flat  # the flag wins
    assert archive_hash() == hashlib.sha256(nested.read_bytes()).hexdigest()


def test_missing_archive_names_both_places(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"config.data.dir.*empathetic_dialogues/empatheticdialogues.tar.gz"):
        find_archive(tmp_path)
    monkeypatch.setenv("EMPAX_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"EMPAX_DATA_DIR = .*nowhere"):
        find_archive()


def test_download_is_verified_and_kept(tmp_path, monkeypatch):
    source = write_archive(tmp_path / "server")
    monkeypatch.setattr(empathetic_dialogues, "ARCHIVE_URL", source.as_uri())
    with pytest.raises(DataError, match="expected 56f234d7"):
        find_archive()
    assert not list((tmp_path / "cache").rglob("*.gz"))
    monkeypatch.setattr(empathetic_dialogues, "ARCHIVE_SHA256", archive_hash(source))
    kept = find_archive()
    assert kept.read_bytes() == source.read_bytes()
    source.unlink()
    assert find_archive() == kept  # not downloaded again
    kept.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"has SHA-256 .* delete it to download it again"):
        find_archive()


def test_no_network_says_how_to_go_on(monkeypatch):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(empathetic_dialogues.urllib.request, "urlopen", refuse)
    with pytest.raises(DataError, match=r"no route.*--config.data.dir=FOLDER or EMPAX_DATA_DIR=FOLDER"):
        find_archive()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["c,1,sad,Rain,0,It rains."], r"train.csv, line 2: 6 columns, must be 8 or 9; found 'c,1,sad"),
        ([*TRAIN, "c,1,sad,Rain,0,a,b,c,d,e"], "line 7: 10 columns"),
        *(
            ([*TRAIN, row], r"train\.csv, line 7: 9 columns, .* must be written _comma_")
            for row in (
                "c,1,proud,P,1,hi, you,5|5|5_2|2|5,",
                "c,1,proud,P,1,hi, you,,",
                "c,1,proud,I passed, too,1,hi,5|5|5_2|2|5,",
                "c,1,proud,P,1,hi,,5|5|5_2|2|5,",
            )
        ),
        (["c,1,gloomy,Rain,0,It rains.,,"], "unknown emotion 'gloomy'; it must be one of afraid, angry"),
        (["c,1,sad,Rain,0, ,,"], "utterance 1 of conversation 'c' is blank"),
        (["c,one,sad,Rain,0,Hm,,"], "utterance_idx is 'one'"),
        (["c,1,sad,Rain,0,Hm,,", "c,1,sad,Rain,0,Hm,,"], "line 3: conversation 'c' has a second utterance 1"),
        (["c,1,sad,Rain,0,Hm,,", "c,3,sad,Rain,0,Hm,,"], r"conversation 'c' has utterances \[1, 3\]"),
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message):
    write_archive(tmp_path, lines)
    with pytest.raises(DataError, match=message):
        load_dialogues(tmp_path)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))


def test_other_columns_are_refused(tmp_path):
    archive = write_archive(tmp_path, header="a,b,c\n")
    with pytest.raises(DataError, match=r"line 1: the columns are a, b, c; they must begin with conv_id"):
        list(read_dialogues(archive, "train"))


@pytest.mark.slow
@pytest.mark.real_data
def test_real_counts(real_data):
    splits = load_dialogues(real_data)
    assert {split: len(found) for split, found in splits.items()} == {"train": 19552, "validation": 2762, "test": 2542}
    assert {d.emotion for d in splits["train"]} == set(empathetic_dialogues.EMOTIONS)
    assert not any("_comma_" in u.text for d in splits["train"] for u in d.utterances)
