"""Converted checkpoints: what lies where in the folder, and restoring it.

A checkpoint is a folder with `config.json` (ours), `params/` (Orbax, one array per
parameter name) and, where the source had them, `tokenizer.json`,
`tokenizer_config.json` and `generation_config.json`. Before a parameter is read, the
names and shapes in `params/` are compared with those that the config asks for.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from jaxkv.config import ModelConfig
from jaxkv.device.llama import param_shapes
from jaxkv.engine.tokenizer import CheckpointTokenizer

FORMAT = "jaxkv"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
PARAMS_FOLDER = "params"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

MIN_GROUP_BYTES = 32 * 2**20

PathLike = str | os.PathLike[str]


def load_config(path: PathLike) -> ModelConfig:
    """Read the model's config.

    Raises:
        ValueError: The folder is no converted checkpoint, or of another version.
    """
    folder = Path(path)
    file = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if not file.is_file():
        raise ValueError(
            f"{folder} is not a converted checkpoint: it has no config.json"
        )
    data = read_json(file)
    if data.get("format") != FORMAT:
        raise ValueError(
            f"{file} is not of a converted checkpoint: `jaxkv convert {folder} DST` "
            "makes one of a Hugging Face folder"
        )
    if data.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {data.get('format_version')!r}, this version "
            f"reads {FORMAT_VERSION}"
        )
    try:
        return ModelConfig.from_json(data["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def load_params(
    path: PathLike, config: ModelConfig | None = None, dtype: str = "auto"
) -> dict[str, jax.Array]:
    """Restore every parameter to the default device.

    Args:
        path: The checkpoint's folder.
        config: The model that the parameters must fit; None: the folder's own.
        dtype: Cast to it while reading, rounding to nearest; `auto`: as stored.

    Returns:
        Parameter name to array, in the order of the forward pass.

    Raises:
        ValueError: Names every missing, unknown or misshapen parameter; nothing has
            been read then.
    """
    config = load_config(path) if config is None else config
    stored = stored_params(path, config)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype if dtype == "auto" else np.dtype(dtype),
            sharding=sharding,
        )
        for name, leaf in stored.items()
    }
    restored = _restore(_params_folder(path), wanted)
    return {name: restored[name] for name in wanted}


def load_tokenizer(path: PathLike) -> CheckpointTokenizer | None:
    """Read the tokenizer; None where the checkpoint has none.

    Raises:
        ValueError: A file is there and cannot be read; names it.
    """
    folder = Path(path)
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    config_file = folder / TOKENIZER_CONFIG_FILE
    config = read_json(config_file) if config_file.is_file() else {}
    return CheckpointTokenizer.from_files(folder / TOKENIZER_FILE, config)


def stored_params(
    path: PathLike, config: ModelConfig
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of every stored parameter, reading none of them.

    Args:
        path: The checkpoint's folder.
        config: The model that the parameters must fit.

    Returns:
        Parameter name to shape and dtype, in the order of the forward pass.

    Raises:
        ValueError: Names every missing, unknown or misshapen parameter.
    """
    folder = _params_folder(path)
    stored = _metadata(folder)
    shapes = param_shapes(config)
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [
        f"{name} is not in the config" for name in stored if name not in shapes
    ]
    problems += [
        f"{name} is {list(stored[name].shape)}, the config asks for {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if problems:
        shown, left = problems[:12], len(problems) - 12
        raise ValueError(
            f"{folder} does not fit the config: {'; '.join(shown)}"
            + (f"; and {left} more" if left > 0 else "")
        )
    return {
        name: jax.ShapeDtypeStruct(tuple(stored[name].shape), stored[name].dtype)
        for name in shapes
    }


def iterate_params(
    path: PathLike, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Read parameters one group after another, for whoever cannot hold them all.

    Args:
        path: The checkpoint's folder.
        config: The model that the parameters must fit.

    Yields:
        Name and host array, in the order of the forward pass. At most one group of
        `group_by_bytes` is in memory, as long as the caller keeps none.
    """
    stored = stored_params(path, config)
    sizes = {name: leaf.size * leaf.dtype.itemsize for name, leaf in stored.items()}
    folder = _params_folder(path)
    leaves = _metadata(folder)
    options = ocp.Context()
    options.pytree.loading.partial_load = True
    for names in group_by_bytes(sizes):
        with options:
            group = _restore(folder, {name: leaves[name] for name in names})
        for name in names:
            yield name, group.pop(name)


def group_by_bytes(sizes: Mapping[str, int]) -> list[list[str]]:
    """Split names into runs of bounded size, keeping their order.

    Orbax takes a while for each call, so that small tensors go together.

    Args:
        sizes: Bytes by name.

    Returns:
        Runs of at most the largest tensor's bytes, or of 32 MiB where that is more.
    """
    limit = max([MIN_GROUP_BYTES, *sizes.values()])
    groups: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes.items():
        if not groups or num_bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= num_bytes
    return groups


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: It is not there, or holds something else; names it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def _params_folder(path: PathLike) -> Path:
    return Path(path).absolute() / PARAMS_FOLDER


def _metadata(folder: Path) -> dict[str, Any]:
    """Return what Orbax knows of each parameter, without reading any."""
    if not folder.is_dir():
        raise ValueError(f"{folder.parent} has no {PARAMS_FOLDER} folder")
    try:
        leaves = ocp.metadata(str(folder)).metadata
    except Exception as error:  # Orbax raises many kinds for a broken folder
        raise ValueError(f"{folder} is broken: {_first_line(error)}") from error
    if leaves is None:  # it logs the reason
        raise ValueError(f"{folder} is broken: Orbax cannot read its metadata")
    return dict(leaves)


def _restore(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load(str(folder), wanted)
    except Exception as error:  # bare Exceptions among them
        cause = _first_line(error.__cause__ or error)
        raise ValueError(f"{folder} cannot be restored: {cause}") from error


def _first_line(error: BaseException) -> str:
    """Return an error's text without tensorstore's dump of its settings."""
    return str(error).split(" [tensorstore_spec", 1)[0].split("\n", 1)[0]
