"""Damaged predictions, corpora, archives, templates and files of a run: read or refused, never a crash."""

import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.fuzz import data_readers
from tests.fuzz import mutations as fuzz
from tests.fuzz.mutations import Worker, json_mutations, mutations
from tests.own_corpus import HEADER, archive_of

pytestmark = pytest.mark.slow

ROWS = [
    {
        "id": "a#2", "context": ["I passed my exam!"], "response": "Well done — café?", "reference": "Congratulations!",
        "emotion": "proud", "emotion_prediction": "sad", "nll": 12.5, "num_tokens": 5, "attributes": {"a": "high"},
        "exemplars": [{"context": ["I won."], "response": "Great.", "emotion": "proud", "score": 0.5, "id": "b#2"}],
        "reference_attributes": {"exploration": "low"}, "response_attributes": {"exploration": "high"},
        "intent": "questioning", "intent_prediction": "questioning", "notes": {"more": [1]},
    },
    {"context": ["Hi.", "Hello.", "Bye."], "response": "", "reference": "See you."},
]  # fmt: skip
OWN = [
    {
        "id": "a",
        "emotion": "sad",
        "situation": "A dog",
        "utterances": ["I lost my dog.", "Oh no — the café's?", "Yes."],
    },
    {"id": "b", "utterances": ["Hi.", "Hello."]},
]
TABLE = (
    f"{HEADER}c,1,sad,My dog,1,I lost my dog_comma_ café.,5|5|5_2|2|5,\nc,2,sad,My dog,2,Oh no.,5|5|5_2|2|5,,one|two\n"
).encode()
EPITOME = (
    'sp_id,rp_id,seeker_post,response_post,level,rationales\r\na,b,"I feel,\r\nlow — café",hang on,1,x\r\n'
    'a,c,"He said ""no""",Why?,2,y|z\r\n'
).encode()
SMALL_TALK = (
    "Hi , café . __eou__ Hello ! __eou__\nSome weed ? __eou__ I ' ll wait . __eou__ Let ' s go . __eou__\n".encode()
)
PAIRS = [
    {
        "question": "I feel low — café.",
        "answers": [""],
        "positive_ctxs": [{"title": "", "text": "I am sorry."}],
        "negative_ctxs": [{"title": "", "text": "Bananas."}],
        "hard_negative_ctxs": [{"title": "", "text": "Try harder."}],
    }
]
TEMPLATE = (
    b"{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no') }}"
    b"{% endif %}{{ '<|' + message.role + '|>\\n' + message['content'] | trim + eos_token }}{% endfor %}"
    b"{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


INTENTS = b"conv_id,utterance_idx,actor,label\na,1,speaker,sad\na,2,listener,questioning\na,4,listener,wishing\n"
SPANS = [{"id": "a#2", "turn": 0, "start": 3, "end": 11}, {"id": "a#2", "turn": 0, "start": 0, "end": 2}]
CAUSES = [{"conv_id": "a", "utters": [["hi"]], "context": "sad", "emotion_cause": [0, 2]}]
RECCON = {
    "d": [[
        {"turn": 1, "speaker": "A", "utterance": "I won , café !", "emotion": "neutral"},
        {"turn": 2, "speaker": "B", "utterance": "Great !", "emotion": "happiness",
         "expanded emotion cause evidence": [1, "b"], "expanded emotion cause span": ["I won", "b"]},
        {"turn": 3, "speaker": "A", "utterance": "So happy .", "emotion": "happiness",
         "expanded emotion cause evidence": [1], "expanded emotion cause span": ["I won"]},
    ]],
}  # fmt: skip


def lines(rows: Any) -> bytes:
    """JSON lines, also of what is no list of rows any more."""
    rows = rows if isinstance(rows, list) else [rows]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def check(reader: str, inputs: st.SearchStrategy[tuple[Any, ...]], good: tuple[Any, ...], *, checksum: bool = False):
    """See `mutations.check`; `good` is read, and with a checksum whatever is read equals it."""
    found = data_readers.READERS[reader](*good)
    expected = repr(found) if checksum else ""
    fuzz.check(reader, data_readers.read, inputs.map(lambda damaged: (reader, expected, *damaged)))


def one(strategy: st.SearchStrategy[bytes]) -> st.SearchStrategy[tuple[bytes]]:
    return strategy.map(lambda raw: (raw,))


def in_bytes_or_values(value: Any, write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(mutations(write(value)), json_mutations(value).map(write))


def test_gzipped_predictions():
    good = gzip.compress(lines(ROWS), mtime=0)
    check("predictions.gz", one(mutations(good)), (good,), checksum=True)


def whole(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("reader", "value", "write"),
    [
        ("predictions", ROWS, lines),
        ("own", OWN, lines),
        ("given_pairs", PAIRS, whole),
        ("spans", SPANS, lines),
        ("causes", CAUSES, lines),
        ("reccon", RECCON, whole),
    ],
)
def test_json(reader: str, value: Any, write: Callable[[Any], bytes]):
    check(reader, one(in_bytes_or_values(value, write)), (write(value),))


@pytest.mark.parametrize(
    ("reader", "good", "donors"),
    [
        ("empathetic_dialogues", TABLE, (b",", b"\n", b"_comma_", TABLE)),
        ("dailydialog", SMALL_TALK, (b"__eou__", b"\n", b" ")),
        ("intents", INTENTS, (b",", b"\n", b"sad", INTENTS)),
        ("template", TEMPLATE, (b"{{ ", b" }}", b"{% for x in range(9) %}", b"{% endfor %}", b"| tojson", b"| int",
                                b"[0]", b"/ 0", b"**")),
    ],
)  # fmt: skip
def test_texts(reader: str, good: bytes, donors: tuple[bytes, ...]):
    check(reader, one(mutations(good, donors=donors)), (good,))


def test_archives():
    good = archive_of(TABLE)
    check("archive", one(mutations(good, donors=(good, archive_of(TABLE * 2)))), (good,), checksum=True)


def test_archives_without_a_checksum():
    good = archive_of(TABLE, mode="w")
    headers = mutations(good[:512]).map(lambda head: head + good[512:])
    last = mutations(good[2048:2560]).map(lambda head: good[:2048] + head + good[2560:])
    check("archive", one(st.one_of(headers, last, mutations(good))), (good,))


def test_epitome():
    both = mutations(EPITOME, donors=(b'"', b",", b"\r\n", EPITOME)).map(lambda raw: (raw, EPITOME))
    check("epitome", both, (EPITOME, EPITOME))


def test_files_of_a_run(finished: Path):
    names = ("config.json", "run.json", "metrics.jsonl", "predictions.jsonl", "evaluate/evaluate.json")
    names += ("prepare/validation.jsonl", "annotate/validation.jsonl")
    files = {name: (finished / name).read_bytes() for name in names}

    @st.composite
    def damaged(draw: st.DrawFn) -> tuple[dict[str, bytes]]:
        name = draw(st.sampled_from(names))
        values = (
            [json.loads(line) for line in files[name].splitlines()] if name.endswith("l") else json.loads(files[name])
        )
        return ({**files, name: draw(in_bytes_or_values(values, lines))},)

    check("work_directory", damaged(), (files,))


HOSTILE = {
    "a bomb": lambda: gzip.compress(bytes(600 << 20), compresslevel=1),
    "a link to another file": lambda: _one_member(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a link to itself": lambda: _one_member(type=tarfile.SYMTYPE, linkname="test.csv"),
    "a hard link to itself": lambda: _one_member(type=tarfile.LNKTYPE, linkname="empatheticdialogues/test.csv"),
    "a pipe": lambda: _one_member(type=tarfile.FIFOTYPE),
    "a folder": lambda: _one_member(type=tarfile.DIRTYPE),
    "another folder's file": lambda: _one_member(name="../empatheticdialogues/test.csv"),
    "a file larger than its archive": lambda: _one_member(size=1 << 40),
    "a sparse file": lambda: _one_member(pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40)}),
}


def _one_member(*, name: str = "empatheticdialogues/test.csv", size: int = 0, **fields: Any) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size or len(TABLE)
    for field, value in fields.items():
        setattr(entry, field, value)
    if "type" in fields:
        entry.size = 0
    return gzip.compress(entry.tobuf(tarfile.PAX_FORMAT) + TABLE.ljust(512, b"\0") + bytes(1024))


def test_hostile_archives_are_refused():
    worker = Worker(data_readers.read, seconds=60.0, memory=2 << 30)
    try:
        outcomes = {kind: worker("archive", "", make()) for kind, make in HOSTILE.items()}
    finally:
        worker.close()
    assert set(outcomes.values()) == {"refused"}, outcomes
