"""Files of weights that were made to do harm: hand-assembled pickles and archives."""

import io
import itertools
import pickle
import pickletools
import time
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from empax.core.files import DataError
from empax.interop import state_dicts
from empax.interop.state_dicts import BadPickleError, read_state_dict
from empax.interop.torch_files import read_torch

NUMBERS = [1.0, 2.0, 3.0, 4.0]


def text(value):
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def number(value):
    return pickle.dumps(value, 2)[2:-1]


def row(*items):
    return b"(" + b"".join(items) + b"t"


def numbers(*values):
    return row(*map(number, values))


FLOATS, ZERO, FIRST, FOUR = name("torch", "FloatStorage"), number(0), text("0"), number(4)
VECTOR, DENSE = numbers(4), numbers(1)


def storage(kind=FLOATS, key=FIRST, size=FOUR):
    return row(text("storage"), kind, key, text("cpu"), size) + b"Q"


HOOKS = name("collections", "OrderedDict") + b")R"
V2 = name("torch._utils", "_rebuild_tensor_v2")


def tensor(store=None, offset=ZERO, size=VECTOR, stride=DENSE):
    return V2 + row(store or storage(), offset, size, stride, b"\x89", HOOKS) + b"R"


def state_dict(**values):
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in values.items()) + b"u."


def archive(folder, content, **entries):
    """A file as torch.save writes it, of this pickle and of four numbers."""
    file = folder / "pytorch_model.bin"
    given = {"data/0": np.array(NUMBERS, np.float32).tobytes(), "byteorder": b"little", "version": b"3\n", **entries}
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as new:
        warnings.simplefilter("ignore")  # of names that come twice
        new.writestr("archive/data.pkl", content)
        for key, value in given.items():
            new.writestr(f"archive/{key}", value)
    return file


def test_the_assembled_file_is_what_torch_reads(tmp_path):
    file = archive(tmp_path, state_dict(a=tensor()))
    assert torch.load(file, weights_only=True)["a"].tolist() == NUMBERS
    np.testing.assert_array_equal(np.asarray(read_torch(file)["a"]), NUMBERS)


OBJECTS = {
    "tensor": b"h\x07",  # the one under "a", from the memo
    "parameter": name("torch._utils", "_rebuild_parameter") + row(tensor(), b"\x89", HOOKS) + b"R",
    "storage": storage(),
    "ordered dict": HOOKS,
    "command line": name("argparse", "Namespace") + b")\x81",
    "device": name("torch", "device") + row(text("cpu")) + b"R",
    "class OrderedDict": name("collections", "OrderedDict"),
    "class Namespace": name("argparse", "Namespace"),
    "class device": name("torch", "device"),
    "class FloatStorage": name("torch", "FloatStorage"),
    "rebuild tensor": V2,
    "rebuild parameter": name("torch._utils", "_rebuild_parameter"),
    "dict": b"}",
    "list": b"]",
    "tuple": b")",
    "text": text("x"),
    "number": number(7),
    "nothing": b"N",
}
"""Everything that a pickle can name or make."""

STATE = b"}(" + text("file") + text("/etc/hostname") + text("offset") + number(0) + text("dtype") + text("O") + b"u"
ATTACKS = {
    "BUILD": STATE + b"b",
    "BUILD of slots": b"N" + STATE + b"\x86b",
    "SETITEM": text("dtype") + text("O") + b"s",
    "SETITEMS": b"(" + text("dtype") + text("O") + b"u",
    "APPEND": number(1) + b"a",
    "APPENDS": b"(" + number(1) + b"e",
    "REDUCE": b")R",
    "REDUCE with a text": text("touch /tmp/ran") + b"\x85R",
    "NEWOBJ": b")\x81",
    "NEWOBJ with a text": text("x") + b"\x85\x81",
    "NEWOBJ_EX": b")}\x92",
    "BINPERSID": b"Q",
    "ADDITEMS": b"(" + number(1) + b"\x90",
    "STACK_GLOBAL": text("system") + b"\x93",
    "OBJ": b"0(cos\nsystem\no",
    "INST": b"0(ios\nsystem\n",
    "EXT1": b"0\x82\x01",
    "EXT4": b"0\x84\x01\x00\x00\x00",
    "PERSID": b"0P0\n",
    "GET": b"0g7\n",
    "DUP": b"20",
    "POP_MARK": b"(1",
    "BYTEARRAY8": b"0\x96" + (1 << 40).to_bytes(8, "little"),
    "NEXT_BUFFER": b"0\x97",
    "LONG4": b"0\x8b\xff\xff\xff\x7f",
    "BINBYTES8": b"0\x8e" + (1 << 40).to_bytes(8, "little"),
}
ALLOWED = {
    *itertools.product(("ordered dict", "command line"), ("BUILD", "BUILD of slots")),
    *itertools.product(("ordered dict", "dict"), ("SETITEM", "SETITEMS")),
    *itertools.product(("list",), ("APPEND", "APPENDS")),
    ("class OrderedDict", "REDUCE"),
    ("class Namespace", "NEWOBJ"),
    # A call that nobody makes; of a tensor it would be refused where it stands for one of the state dict.
    *itertools.product(("class device",), ("REDUCE", "REDUCE with a text")),
}
"""What real files do. Each of the others is refused."""


@pytest.mark.parametrize("thing", OBJECTS)
def test_no_instruction_changes_calls_or_makes_anything(tmp_path, thing):
    for attack, instruction in ATTACKS.items():
        # Within a tuple, however many values the instruction leaves.
        content = state_dict(a=tensor() + b"q\x07", b=b"(" + OBJECTS[thing] + instruction + b"t")
        file = archive(tmp_path, content)
        calls = attack.startswith("REDUCE") and thing.startswith("rebuild")
        if (thing, attack) in ALLOWED or calls:
            np.testing.assert_array_equal(np.asarray(read_torch(file)["a"]), NUMBERS, err_msg=attack)
        else:
            with pytest.raises(DataError, match=r"pytorch_model\.bin"):
                read_torch(file)


def test_a_call_that_makes_no_tensor_is_refused_where_a_tensor_is_wanted(tmp_path):
    for content in (V2 + b")R", V2 + text("x") + b"\x85R", name("torch._utils", "_rebuild_parameter") + b")R"):
        with pytest.raises(DataError, match=r"arguments|parameter of nothing"):
            read_torch(archive(tmp_path, state_dict(a=content)))


@pytest.mark.parametrize("module", ["os", "builtins", "torch", "torch.storage", "numpy", "collections", "argparse"])
@pytest.mark.parametrize(
    "attribute", ["system", "eval", "load", "_load_from_bytes", "OrderedDict.fromkeys", "__dict__"]
)
def test_no_other_global(tmp_path, module, attribute):
    for instruction in (name(module, attribute), text(module) + text(attribute) + b"\x93"):
        with pytest.raises(DataError, match=r"asks for .*refused"):
            read_torch(archive(tmp_path, state_dict(a=tensor(), b=instruction + b")R")))


HUGE = 2**62
BAD_TENSORS = {
    "a negative offset": {"offset": number(-1)},
    "an offset beyond": {"offset": number(1)},
    "an offset that overflows": {"offset": number(HUGE)},
    "an offset in words": {"offset": text("0")},
    "an offset that is a switch": {"offset": b"\x89"},
    "strides of both signs": {"size": numbers(2, 2), "stride": numbers(4, -1)},
    "a negative stride": {"stride": numbers(-1)},
    "a stride beyond": {"stride": numbers(2)},
    "a stride that overflows": {"size": numbers(5), "stride": numbers(HUGE)},
    "a negative size": {"size": numbers(-4)},
    "a size beyond": {"size": numbers(5)},
    "sizes that overflow": {"size": numbers(2**32, 2**32), "stride": numbers(0, 0)},
    "sizes that overflow to 0": {"size": numbers(2**61, 8), "stride": numbers(0, 0)},
    "a size of many bits": {"size": numbers(2**200)},
    "a size that is no number": {"size": row(b"G" + b"\x40\x10" + b"\0" * 6)},
    "a size that is a list": {"size": b"](" + number(4) + b"e"},
    "fewer strides than sizes": {"size": numbers(2, 2)},
    "a hundred axes": {"size": numbers(*[1] * 100), "stride": numbers(*[1] * 100)},
    "no storage": {"store": number(0)},
    "a tensor for a storage": {"store": tensor()},
    "a storage of more": {"store": storage(size=number(400))},
    "a storage of fewer than there are": {"store": storage(size=number(3))},
    "a storage of no size": {"store": storage(size=b"N")},
    "a storage elsewhere": {"store": storage(key=text("1"))},
    "a storage out of its folder": {"store": storage(key=text("../byteorder"))},
    "a storage of the file system": {"store": storage(key=text("/etc/hostname"))},
    "a storage named by a number": {"store": storage(key=number(0))},
    "a storage of no type": {"store": storage(kind=name("collections", "OrderedDict"))},
    "a storage of a device": {"store": storage(kind=name("torch", "device"))},
    "a storage typed in words": {"store": storage(kind=text("O"))},
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_every_number_of_a_tensor_is_checked(tmp_path, kind):
    order = ("store", "offset", "size", "stride")
    usual = {"store": storage(), "offset": number(0), "size": numbers(4), "stride": numbers(1)}
    values = usual | BAD_TENSORS[kind]
    with pytest.raises(DataError, match=r"pytorch_model\.bin"):
        read_torch(archive(tmp_path, state_dict(a=tensor(*(values[key] for key in order)))))


def test_a_stride_along_an_axis_of_one_entry_leads_nowhere(tmp_path):
    file = archive(tmp_path, state_dict(a=tensor(storage(), number(0), numbers(1, 4), numbers(2**61, 1))))
    np.testing.assert_array_equal(np.asarray(read_torch(file)["a"]), [NUMBERS])


def test_what_would_take_forever_to_hash_or_to_print_does_not(tmp_path):
    doubled = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100))  # holds 2 ** 100 tuples
    for harm in (b"}" + doubled + b"Ns", doubled + b"Q", doubled + b")R", doubled + b"}b"):
        begun = time.monotonic()
        with pytest.raises(DataError, match=r"refused|tuple"):
            read_torch(archive(tmp_path, state_dict(a=tensor(), b=harm)))
        assert time.monotonic() - begun < 1.0


def test_a_memo_far_out_takes_no_memory(tmp_path):
    far = b"r\xff\xff\xff\x7f"  # LONG_BINPUT 2 ** 31 - 1: Python's own unpickler makes a table of that length
    file = archive(tmp_path, state_dict(a=tensor() + far))
    np.testing.assert_array_equal(np.asarray(read_torch(file)["a"]), NUMBERS)


def test_deep_nesting_and_circles_are_harmless(tmp_path):
    deep = state_dict(a=tensor(), b=b")" + b"\x85" * 20_000, c=b"]" * 20_000 + b"a" * 19_999)
    assert list(read_torch(archive(tmp_path, deep))) == ["a"]
    circle = b"\x80\x02}q\x00(" + text("model") + b"h\x00" + text("a") + tensor() + b"u."
    assert list(read_torch(archive(tmp_path, circle))) == ["a"]


def test_an_archive_that_says_two_things(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = archive(tmp_path, state_dict(a=tensor()))
        with zipfile.ZipFile(file, "a") as more:
            more.writestr("archive/data/0", b"\0" * 16)
    with pytest.raises(DataError, match="more than once; fetch it again"):
        read_torch(file)
    file = archive(tmp_path, state_dict(a=tensor()))
    with zipfile.ZipFile(file, "a") as more:
        more.writestr("other/data.pkl", b"N.")
    with pytest.raises(DataError, match=r"it has 2 data\.pkl"):
        read_torch(file)


COMPRESSED = r"pytorch_model\.bin: archive/data/0 is compressed or encrypted"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (42, 0, "have another checksum; fetch it again"),
        (42, 10**6, "is not where its directory says; fetch it again"),
        *((field, value, COMPRESSED) for field, value in ((20, 4), (24, 4), (20, 2**31), (10, 8), (8, 1))),
    ],
)
def test_a_directory_that_lies(tmp_path, field, value, said):
    """Of the storage's row in the central directory: its place, its sizes, its compression, its flags."""
    file = archive(tmp_path, state_dict(a=tensor()))
    content = bytearray(file.read_bytes())
    at = content.rindex(b"archive/data/0") - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    size = 4 if field >= 20 else 2
    content[at + field : at + field + size] = value.to_bytes(size, "little")
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        np.asarray(read_torch(file)["a"])


def test_a_storage_that_is_shorter_than_the_file_says(tmp_path):
    with pytest.raises(DataError, match="the storage of a has another size; fetch it again"):
        read_torch(archive(tmp_path, state_dict(a=tensor()), **{"data/0": bytes(8)}))
    file = archive(tmp_path, state_dict(a=tensor()))
    with zipfile.ZipFile(file) as written:
        at = written.getinfo("archive/data/0").header_offset
    content = bytearray(file.read_bytes())
    content[at + 28 : at + 30] = b"\xff\xff"  # of the local header: how much stands before the numbers
    file.write_bytes(content)
    with pytest.raises(DataError, match="is cut short: archive/data/0 ends after the file does; fetch it again"):
        read_torch(file)


def test_every_flipped_bit_of_pickle_and_numbers_is_noticed(tmp_path):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.tensor(NUMBERS), "b": torch.ones(2, 2).T}, file)
    content = file.read_bytes()
    with zipfile.ZipFile(file) as saved:
        parts = [saved.read(entry) for entry in saved.namelist() if "/data" in entry]
    places = {content.index(part) + i for part in parts for i in range(len(part))}
    assert len(places) > 100
    for place in sorted(places):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(DataError, match=r"is damaged: .* have another checksum"):
            [np.asarray(found) for found in read_torch(file).values()]


def test_a_checksum_is_taken_once_for_a_shared_storage(tmp_path, monkeypatch):
    base = torch.arange(100.0)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": base, "b": base[50:]}, file)
    read = read_torch(file)
    taken, real = [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda content, *start: taken.append(len(content)) or real(content, *start))
    np.asarray(read["a"]), np.asarray(read["b"])
    assert taken == [400]


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
PIECES = [*OPCODES, *OBJECTS.values(), *ATTACKS.values(), b"\x01", b"\xff\xff\xff\x7f", text("storage"), tensor()]


def parts(value, seen):
    """All that can be reached from what a pickle gave."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    for item in inner if isinstance(value, dict | list | tuple) else ():
        parts(item, seen)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_whatever_the_instructions_only_plain_values_come_out(content):
    own = (state_dicts.Token, state_dicts.Storage, state_dicts.Call, state_dicts.Ordered)
    plain = (dict, list, tuple, str, bytes, int, float, bool, type(None), *own)
    try:
        value = read_state_dict(b"\x80\x02" + content + b".", frozenset(["FloatStorage"]))
    except BadPickleError:
        return
    seen = {}
    parts(value, seen)
    assert {type(found) for found in seen.values()} <= set(plain)
    assert not any(hasattr(found, "__dict__") for found in seen.values() if type(found) in (*own, dict, list))


@settings(max_examples=50, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_it_reads_what_python_reads(data):
    """Plain values, written by Python's own pickler."""
    leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
    values = st.recursive(
        leaves, lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(st.text(), v), max_leaves=8
    )
    value = data.draw(st.dictionaries(st.text(), values))
    buffer = io.BytesIO()
    pickle.Pickler(buffer, data.draw(st.sampled_from([2, 3, 4, 5]))).dump(value)
    assert read_state_dict(buffer.getvalue(), frozenset()) == value
