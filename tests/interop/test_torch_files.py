import argparse
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from empax.core.files import DataError
from empax.interop.torch_files import read_torch


def rewritten(file, change):
    """The same archive with the content of each entry passed through `change`."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, change(name, content))
    return file


def saved(folder, value, **options):
    file = folder / "pytorch_model.bin"
    torch.save(value, file, **options)
    return file


DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.oracle
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_is_read_as_torch_reads_it(tmp_path, name):
    numbers = torch.arange(24).reshape(2, 3, 4)
    tensor = (numbers % 2 if name == "bool" else numbers).to(getattr(torch, name))
    file = saved(tmp_path, {"a": tensor, "turned": tensor.permute(2, 0, 1)[1:]})
    read, theirs = read_torch(file), torch.load(file, weights_only=True)
    for key, value in theirs.items():
        array = np.asarray(read[key])
        assert (read[key].shape, array.dtype) == (array.shape, read[key].dtype) == (tuple(value.shape), array.dtype)
        assert array.dtype.name == name
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert np.ascontiguousarray(array).tobytes() == raw


def test_types_that_no_weights_have_and_lazy_signs_are_refused(tmp_path):
    for dtype, said in ((torch.complex64, "ComplexFloatStorage"), (torch.float8_e5m2, "_utils._rebuild_tensor_v3")):
        with pytest.raises(DataError, match=rf"asks for torch\.{said}"):
            read_torch(saved(tmp_path, {"a": torch.zeros(2, dtype=dtype)}))
    with pytest.raises(DataError, match="a is stored as negative"):
        read_torch(saved(tmp_path, {"a": torch.view_as_complex(torch.ones(2, 2)).conj().imag}))


def test_a_boolean_of_another_byte_than_0_and_1_is_true(tmp_path):
    file = saved(tmp_path, {"a": torch.tensor([True, False, True])})
    rewritten(file, lambda name, content: bytes([2, 0, 255]) if name.endswith("/data/0") else content)
    array = np.asarray(read_torch(file)["a"])
    assert array.view(np.uint8).tolist() == [1, 0, 1]


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        file = saved(tmp_path, {"a": torch.arange(3.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    np.testing.assert_array_equal(np.asarray(read_torch(file)["a"]), [0.0, 1.0, 2.0])


@pytest.mark.oracle
def test_views_strides_and_shared_storages_are_read_as_torch_reads_them(tmp_path):
    base = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    tensors = OrderedDict(
        whole=base,
        turned=base.T,
        part=base[2:5, 1::3],
        row=base[3],
        expanded=base[:, :1].expand(6, 4),
        number=base[1, 2],
        empty=base[:0],
        parameter=torch.nn.Parameter(base * 2),
        permuted=torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    )
    read = read_torch(saved(tmp_path, tensors))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(np.asarray(read[name]), tensor.detach().numpy(), err_msg=name)
    shared = {read[name].offset for name in ("whole", "turned", "expanded")}
    assert len(shared) == 1


@pytest.mark.oracle
@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_training_checkpoint_gives_its_weights(tmp_path, key):
    model = torch.nn.Linear(3, 2)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}]}
    options = argparse.Namespace(lr=1e-4, device=torch.device("cpu"), reader_model_type="google/t5-base-lm-adapt")
    checkpoint = {"step": 3, key: model.state_dict(), "optimizer": optimizer, "opt": options}
    read = read_torch(saved(tmp_path, checkpoint))
    assert set(read) == {"weight", "bias"}
    np.testing.assert_array_equal(np.asarray(read["weight"]), model.weight.detach().numpy())


class Global:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, protocol):
    trace = tmp_path / "ran"
    evil = Global(os.system, f"touch {trace}")
    file = saved(tmp_path, {"a": torch.ones(1), "b": evil}, pickle_protocol=protocol)
    with pytest.raises(DataError, match=r"asks for (posix|nt)\.system.*refused"):
        read_torch(file)
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists()  # the pickle meant it


def test_formats_that_are_not_read_are_told_apart(tmp_path):
    old = saved(tmp_path, {"a": torch.ones(4)}, _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"before version 1\.6.*save its tensors as safetensors"):
        read_torch(old)
    plain = tmp_path / "plain.bin"
    plain.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataError, match=r"before version 1\.6"):
        read_torch(plain)
    with pytest.raises(DataError, match="none is a tensor"):
        read_torch(saved(tmp_path, {"a": 1}))
    with pytest.raises(DataError, match="holds a list, not a state dict"):
        read_torch(saved(tmp_path, [1]))
    with zipfile.ZipFile(old, "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(DataError, match=r"not one of PyTorch's"):
        read_torch(old)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short(tmp_path, share):
    file = saved(tmp_path, {"a": torch.ones(400)})
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="not a whole zip file"):
        read_torch(file)
