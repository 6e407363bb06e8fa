"""Reading safetensors files: the header first and whole, then one tensor at a time.

A file is 8 bytes of header length (little endian), a JSON header that gives each
tensor's dtype, shape and byte range, and the bytes. Everything a hostile or broken
header can claim is checked against the file's real length before a tensor is read.
Tensors are read, not mapped: pages of a mapped file count as the process's memory.
"""

import collections
import functools
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.source import TensorRef

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as the format's reference implementation has it


def open_safetensors(path: Path) -> dict[str, TensorRef]:
    """Read and check one file's header.

    Returns:
        Every tensor of the file, by name; none is read yet.

    Raises:
        ValueError: The file is not there, is shorter or longer than its header says,
            or has a header that contradicts itself; names the file.
    """
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "missing"
        raise ValueError(f"{path} is {kind}, not a safetensors file")
    file_bytes = path.stat().st_size
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES or header_bytes > file_bytes - LENGTH_BYTES:
            raise ValueError(
                f"{path} is truncated or no safetensors file: {file_bytes} bytes "
                f"cannot hold the header of {header_bytes} bytes it announces"
            )
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path}: a header of {header_bytes} bytes is over the format's limit "
                f"of {MAX_HEADER_BYTES}"
            )
        header = _parse_header(path, file.read(header_bytes))
    start = LENGTH_BYTES + header_bytes
    data_bytes = _check_layout(path, header)
    if start + data_bytes != file_bytes:
        kind = "truncated" if file_bytes < start + data_bytes else "too long"
        raise ValueError(
            f"{path} is {kind}: its header asks for {start + data_bytes} bytes, the "
            f"file has {file_bytes}"
        )
    return {
        name: TensorRef(
            name=name,
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
            load=functools.partial(
                _read,
                path,
                start + entry["data_offsets"][0],
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
            ),
        )
        for name, entry in header.items()
    }


def read_metadata(path: Path) -> dict[str, Any]:
    """Return what a file's writer noted in it; empty if the file is not readable."""
    try:
        with open(path, "rb") as file:
            num_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if num_bytes > MAX_HEADER_BYTES:
                return {}
            metadata = json.loads(file.read(num_bytes))["__metadata__"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _parse_header(path: Path, raw: bytes) -> dict[str, dict[str, Any]]:
    """Parse the JSON and check the form of every entry, but not yet their ranges."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a {type(header).__name__}, not a dict")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {
            "dtype",
            "shape",
            "data_offsets",
        }:
            raise ValueError(f"{path}: tensor {name!r} has the header entry {entry!r}")
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name!r} has the unknown dtype {entry['dtype']!r}"
            )
        for key in ("shape", "data_offsets"):
            numbers = entry[key]
            if not isinstance(numbers, list) or not all(
                type(number) is int and number >= 0 for number in numbers
            ):
                raise ValueError(f"{path}: tensor {name!r} has {key} {numbers!r}")
    return header


def _check_layout(path: Path, header: dict[str, dict[str, Any]]) -> int:
    """Check that the byte ranges tile the data without gap or overlap.

    Returns:
        Bytes of data after the header.
    """
    for name, entry in header.items():
        if len(entry["data_offsets"]) != 2:
            raise ValueError(
                f"{path}: tensor {name!r} has data_offsets {entry['data_offsets']}"
            )
        begin, end = entry["data_offsets"]
        num_elements = 1
        for size in entry["shape"]:
            num_elements *= size
        num_bytes = num_elements * DTYPES[entry["dtype"]].itemsize
        if end - begin != num_bytes:
            raise ValueError(
                f"{path}: tensor {name!r} takes {num_bytes} bytes by its shape "
                f"{entry['shape']} and {end - begin} by its data_offsets"
            )
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != position:
            raise ValueError(
                f"{path}: tensor {name!r} starts at byte {begin} of the data, the one "
                f"before it ends at {position}"
            )
        position = end
    return position


def _read(
    path: Path, offset: int, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    """Read one tensor into an array of its own."""
    array = np.empty(shape, dtype)
    view = array.reshape(-1).view(np.uint8)
    with open(path, "rb", buffering=0) as file:
        file.seek(offset, os.SEEK_SET)
        done = 0
        while done < view.size:
            count = file.readinto(memoryview(view)[done:])
            if not count:
                raise ValueError(f"{path} became shorter while it was read")
            done += count
    return array


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice} appear twice")
    return result
