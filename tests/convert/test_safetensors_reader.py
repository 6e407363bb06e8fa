"""Files are read bit for bit; headers that lie are errors before a tensor is read."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convert.safetensors_reader import open_safetensors
from tests.convert.folders import same_bits


def write_raw(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        np.int8,
        np.bool_,
    ],
)
def test_every_bit_pattern_arrives(tmp_path, dtype):
    bits = np.random.default_rng(0).integers(0, 256, 4 * 300_000, dtype=np.uint8)
    bits = bits % 2 if dtype is np.bool_ else bits
    values = bits.view(dtype)
    tensors = {
        "large": values.reshape(1000, -1),
        "small": values[:3],
        "scalar": values[:1].reshape(()),
        "empty": values[:0].reshape(0, 7),
    }
    codes = {"bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    codes |= {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
    header, position = {}, 0
    for name, array in tensors.items():
        offsets = (position, position + array.nbytes)
        header[name] = entry(codes[array.dtype.name], array.shape, offsets)
        position += array.nbytes
    path = write_raw(
        tmp_path / "x.safetensors",
        header,
        b"".join(array.tobytes() for array in tensors.values()),
    )
    opened = open_safetensors(path)
    assert list(opened) == list(tensors)
    for name, array in tensors.items():
        assert (opened[name].shape, opened[name].dtype) == (array.shape, array.dtype)
        assert same_bits(opened[name].load(), array)


def test_files_of_the_reference_implementation_are_read(tmp_path):
    tensors = {"b": np.arange(6.0).reshape(2, 3), "a": np.ones((), np.float32)}
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    opened = open_safetensors(path)
    assert set(opened) == {"a", "b"}
    assert all(same_bits(opened[name].load(), tensors[name]) for name in tensors)


def test_a_loaded_tensor_belongs_to_the_caller(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(8))
    ref = open_safetensors(path)["a"]
    ref.load()[:] = 7.0
    assert ref.load().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", r"the header is not valid JSON"),
        (b"\xff\xfe", b"", r"the header is not valid JSON"),
        (b"[" * 100_000, b"", r"the header is not valid JSON"),
        (b'{"a": %s}' % (b"9" * 5000), b"", r"the header is not valid JSON"),
        (b"[]", b"", r"the header is a list, not a dict"),
        (
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":1}',
            b"",
            r"\['a'\] appear twice",
        ),
        ({"a": 3}, b"", r"tensor 'a' has the header entry 3"),
        (
            {"a": {"dtype": "F32", "shape": [1]}},
            b"",
            r"tensor 'a' has the header entry",
        ),
        (
            {"a": entry(dtype="F13")},
            bytes(8),
            r"tensor 'a' has the unknown dtype 'F13'",
        ),
        ({"a": entry(dtype=["F32"])}, bytes(8), r"tensor 'a' has the unknown dtype"),
        ({"a": entry(shape=[-2])}, bytes(8), r"tensor 'a' has shape \[-2\]"),
        ({"a": entry(shape=[2.0])}, bytes(8), r"tensor 'a' has shape \[2.0\]"),
        ({"a": entry(shape=[True])}, bytes(8), r"tensor 'a' has shape \[True\]"),
        ({"a": entry(shape="2")}, bytes(8), r"tensor 'a' has shape '2'"),
        ({"a": entry(offsets=[0])}, bytes(8), r"tensor 'a' has data_offsets \[0\]"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), r"takes 8 bytes by its shape .* -8"),
        ({"a": entry(shape=[3])}, bytes(8), r"takes 12 bytes by its shape .* and 8"),
        (
            {"a": entry(shape=[2**40, 2**40])},
            bytes(8),
            r"takes 4835703278458516698824704",
        ),
        (
            {"a": entry(), "b": entry(offsets=[4, 12])},
            bytes(12),
            r"tensor 'b' starts at byte 4 of the data, the one before it ends at 8",
        ),
        (
            {"a": entry(), "b": entry(offsets=[12, 20])},
            bytes(20),
            r"tensor 'b' starts at byte 12 of the data",
        ),
        ({"a": entry(offsets=[4, 12])}, bytes(12), r"tensor 'a' starts at byte 4"),
        ({"a": entry()}, bytes(7), r"is truncated: its header asks for 7\d bytes"),
        ({"a": entry()}, bytes(9), r"is too long: its header asks for 7\d bytes"),
    ],
    ids=map(str, itertools.count()),
)
def test_a_header_that_lies_is_an_error(tmp_path, header, data, message):
    path = write_raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ValueError, match=r"x\.safetensors.*" + message):
        open_safetensors(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\0\0",
        (2**63).to_bytes(8, "little") + b"{}",
        b"\x03" + bytes(7) + b"{}",
    ],
    ids=["empty", "short", "huge", "one_short"],
)
def test_a_header_that_the_file_cannot_hold_is_an_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors is truncated or no"):
        open_safetensors(path)


def test_a_header_over_the_formats_limit_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse: takes no disk
    with pytest.raises(ValueError, match=r"header of 100000001 bytes is over"):
        open_safetensors(path)


def test_a_directory_or_nothing_in_place_of_the_file_is_an_error(tmp_path):
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"d\.safetensors is a directory"):
        open_safetensors(tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match=r"n\.safetensors is missing"):
        open_safetensors(tmp_path / "n.safetensors")


def test_a_file_cut_while_it_is_open_is_an_error(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", {"a": entry()}, bytes(8))
    ref = open_safetensors(path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"x\.safetensors became shorter"):
        ref.load()
