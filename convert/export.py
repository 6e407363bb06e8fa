"""Writing a converted checkpoint back as a Hugging Face folder.

The folder is what transformers 4 and 5 both read. Shards are streamed: their headers
are known from the config, so each tensor is written as soon as it is read.
"""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np

from convert.hf_config import write_model_config
from convert.huggingface import INDEX_FILE, LM_HEAD, SINGLE_FILE
from convert.safetensors_reader import DTYPES, LENGTH_BYTES, read_metadata
from convert.writer import byte_bar, check_destination, new_folder, write_json
from jaxkv.config import ModelConfig
from jaxkv.engine.checkpoint import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    iterate_params,
    load_config,
    stored_params,
)

MAX_SHARD_BYTES = 5 * 10**9
COPIED_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE)
# In every shard. transformers wants the format, and writes only that itself.
SHARD_METADATA = {"format": "pt", "written_by": "jaxkv export"}
DTYPE_CODES = {dtype.name: code for code, dtype in DTYPES.items()}


def is_exported(folder: Path) -> bool:
    """Say whether a folder is what an export wrote and nothing else.

    The shards tell: any other program that writes a model writes its own.
    """
    names = {entry.name for entry in folder.iterdir()}
    shards = names - {"config.json", INDEX_FILE, *COPIED_FILES}
    return bool(shards) and all(
        name.startswith("model")
        and name.endswith(".safetensors")
        and read_metadata(folder / name) == SHARD_METADATA
        for name in shards
    )


def write_huggingface(
    source: Path,
    destination: Path,
    *,
    overwrite: bool = False,
    progress: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    Calibrated KV scales become float32 tensors of shape [1], with llm-compressor's
    names. No `quantization_config` describes them: transformers would not load the
    model without the package that it names, whereas a tensor that it does not know
    only makes it warn.

    Args:
        source: A converted checkpoint.
        destination: A folder that does not exist yet, or may be replaced.
        overwrite: Replace an export that is there.
        progress: Show a progress bar, in bytes, on stderr.
        max_shard_bytes: Start another shard before this; one tensor is never split.

    Raises:
        ValueError: The source is no checkpoint, the destination is taken, or Hugging
            Face has no model of this arithmetic.
    """
    check_destination(destination, overwrite=overwrite, is_ours=is_exported)
    config = load_config(source)
    hf_config = write_model_config(config)
    # Scales go first: any number of them leaves what follows aligned.
    stored = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for name, array in kv_scale_tensors(config).items()
    }
    stored |= stored_params(source, config)
    shards = _plan_shards(stored, max_shard_bytes)
    with new_folder(destination, overwrite=overwrite, is_ours=is_exported) as folder:
        write_json(folder / "config.json", hf_config)
        for name in COPIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if len(shards) > 1:
            weight_map = {
                hf_name(name): shard
                for shard, names in shards.items()
                for name in names
            }
            total = sum(_num_bytes(leaf) for leaf in stored.values())
            write_json(
                folder / INDEX_FILE,
                {"metadata": {"total_size": total}, "weight_map": weight_map},
            )
        _write_shards(folder, source, config, stored, shards, progress)


def hf_name(name: str) -> str:
    """Return a parameter's name in Hugging Face."""
    return name if name == LM_HEAD else f"model.{name}"


def kv_scale_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the KV scales as tensors, by their names in Hugging Face less `model.`."""
    return {
        f"layers.{layer}.self_attn.{name}": np.array([value], np.float32)
        for layer, pair in enumerate(config.kv_scales)
        if pair is not None
        for name, value in zip(("k_scale", "v_scale"), pair, strict=True)
    }


def _plan_shards(
    stored: Mapping[str, jax.ShapeDtypeStruct], max_shard_bytes: int
) -> dict[str, list[str]]:
    """Return the tensor names of each file, in the order they are written."""
    groups: list[list[str]] = []
    room = 0
    for name, leaf in stored.items():
        if not groups or _num_bytes(leaf) > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= _num_bytes(leaf)
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _write_shards(
    folder: Path,
    source: Path,
    config: ModelConfig,
    stored: Mapping[str, jax.ShapeDtypeStruct],
    shards: Mapping[str, list[str]],
    progress: bool,
) -> None:
    tensors = itertools.chain(
        kv_scale_tensors(config).items(), iterate_params(source, config)
    )
    total = sum(_num_bytes(leaf) for leaf in stored.values())
    with byte_bar(total, "exporting", progress) as bar:
        for shard, names in shards.items():
            with open(folder / shard, "wb") as file:
                _write_header(file, {name: stored[name] for name in names})
                for name in names:
                    read_name, array = next(tensors)
                    assert read_name == name, (read_name, name)
                    file.write(memoryview(array.reshape(-1).view(np.uint8)))
                    bar.update(array.nbytes)
                    del array  # or it would stay while the next group is read


def _write_header(file: BinaryIO, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    header: dict[str, object] = {"__metadata__": SHARD_METADATA}
    position = 0
    for name, leaf in leaves.items():
        end = position + _num_bytes(leaf)
        header[hf_name(name)] = {
            "dtype": DTYPE_CODES[leaf.dtype.name],
            "shape": list(leaf.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)  # so that the data is aligned
    file.write(len(raw).to_bytes(LENGTH_BYTES, "little") + raw)


def _num_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize
