"""Opening a Hugging Face folder: its config, its safetensors shards, its tokenizer.

Only headers are read here, all of them, and KV scales of a number each, so that
whatever is missing, cut short, unknown or misshapen is named before a parameter is
loaded or a file written.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.hf_config import read_model_config, stated_dtype
from convert.hf_quantization import check_hf_quant_config, take_kv_scales
from convert.safetensors_reader import open_safetensors
from convert.source import Source, TensorRef, check_tensors, join
from jaxkv.device.llama import param_shapes
from jaxkv.engine.checkpoint import FORMAT
from jaxkv.engine.tokenizer import read_special_tokens, read_tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZATION_FILE = "hf_quant_config.json"
PARAM_DTYPES = ("float32", "bfloat16", "float16")
LM_HEAD = "lm_head.weight"
EMBEDDINGS = "embed_tokens.weight"
# Rotary frequencies that old versions stored; every reader computes them.
ROTARY_BUFFER = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
OTHER_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt")


def open_huggingface(folder: Path) -> Source:
    """Open a Hugging Face folder.

    The config's dtype is the parameters' own where all have the same, else the one
    that `config.json` states, else float32.

    Raises:
        ValueError: One sentence that names what is missing, truncated, unknown or
            misshapen.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"{folder} is not a Hugging Face folder: it has no config.json"
        )
    data = read_json(config_file)
    if data.get("format") == FORMAT:
        raise ValueError(f"{folder} is a converted checkpoint already")
    tokenizer_json, tokenizer_config = _read_tokenizer_files(folder)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    config = read_model_config(
        data,
        where=str(config_file),
        more_eos_ids=[
            *_generation_eos_ids(generation_file, generation),
            *_tokenizer_eos_ids(folder, tokenizer_json, tokenizer_config),
        ],
    )
    quantization_file = folder / QUANTIZATION_FILE
    if quantization_file.is_file():
        problems = check_hf_quant_config(read_json(quantization_file))
        if problems:
            raise ValueError(f"{quantization_file}: {join(problems)}")
    stored = open_shards(folder)
    config = dataclasses.replace(
        config,
        kv_scales=take_kv_scales(str(folder), stored, config.num_hidden_layers),
        dtype=_common_dtype(folder, stored, data),
    )
    tensors = {}
    for name, ref in stored.items():
        short = name.removeprefix("model.")
        if short == name and name != LM_HEAD:
            short = f"not in the model: {name}"
        if not ROTARY_BUFFER.fullmatch(short):
            tensors[short] = ref
    if config.tie_word_embeddings:
        _store_tied_once(folder, tensors)
    check_tensors(str(folder), tensors, param_shapes(config))
    if not generation_file.is_file():
        generation = {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": list(config.eos_token_ids),
        }
    return Source(
        where=str(folder),
        config=config,
        tensors=tensors,
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        generation_config=generation,
    )


def open_shards(folder: Path) -> dict[str, TensorRef]:
    """Open `model.safetensors`, or all shards that the index lists.

    As in transformers, the single file counts where both are there, and a shard that
    the index does not list is ignored.

    Raises:
        ValueError: A shard is missing, broken, or disagrees with the index.
    """
    index_file = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not index_file.is_file():
        _check_weights_exist(folder)
        return open_safetensors(folder / SINGLE_FILE)
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_file} has no weight_map")
    names_by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index_file}: {name} lies in {shard!r}, not a file name")
        names_by_shard.setdefault(shard, set()).add(name)
    missing = [shard for shard in names_by_shard if not (folder / shard).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {INDEX_FILE} lists shards that are missing: {join(missing)}"
        )
    tensors: dict[str, TensorRef] = {}
    for shard, names in names_by_shard.items():
        found = open_safetensors(folder / shard)
        if set(found) != names:
            problems = [
                f"{name} is not in {shard}" for name in sorted(names - set(found))
            ]
            problems += [
                f"{name} of {shard} is not listed there"
                for name in sorted(set(found) - names)
            ]
            raise ValueError(f"{index_file}: {join(problems)}")
        tensors |= found
    return tensors


def _check_weights_exist(folder: Path) -> None:
    if (folder / SINGLE_FILE).exists():
        return
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    hint = ""
    if others:
        hint = f"; {join(others)} cannot be read without the index"
    elif pickles:
        hint = (
            f"; {join(pickles)} are pickles, which are not read: save the model with "
            "safe_serialization=True"
        )
    raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def _common_dtype(
    folder: Path, stored: Mapping[str, TensorRef], data: Mapping[str, Any]
) -> str:
    """Choose one dtype for all parameters; see `open_huggingface`."""
    used = {
        name: ref
        for name, ref in stored.items()
        if not ROTARY_BUFFER.fullmatch(name.removeprefix("model."))
    }
    problems = [
        f"{name} has dtype {ref.dtype.name}"
        for name, ref in used.items()
        if ref.dtype.name not in PARAM_DTYPES
    ]
    if problems:
        raise ValueError(f"{folder}: only {PARAM_DTYPES} are read: {join(problems)}")
    names = {ref.dtype.name for ref in used.values()}
    return names.pop() if len(names) == 1 else stated_dtype(data) or "float32"


def _store_tied_once(folder: Path, tensors: dict[str, TensorRef]) -> None:
    """Drop the second copy of tied embeddings, which must be the same."""
    head = tensors.pop(LM_HEAD, None)
    if head is None:
        return
    embeddings = tensors.setdefault(EMBEDDINGS, head)
    if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape) or (
        _digest(head) != _digest(embeddings)
    ):
        raise ValueError(
            f"{folder}: tie_word_embeddings is true, but {head.name} differs from "
            f"{embeddings.name}"
        )


def _digest(ref: TensorRef) -> bytes:
    return hashlib.sha256(ref.load().reshape(-1).view(np.uint8)).digest()


def _read_tokenizer_files(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return `tokenizer.json`'s text and the settings, chat template included."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    if (folder / "chat_template.json").is_file():
        settings |= read_json(folder / "chat_template.json")
    if (folder / "chat_template.jinja").is_file():
        template = _read_text(folder / "chat_template.jinja")
        settings["chat_template"] = template
    file = folder / "tokenizer.json"
    if file.is_file():
        return _read_text(file), settings
    others = [name for name in OTHER_TOKENIZER_FILES if (folder / name).exists()]
    if others:
        raise ValueError(
            f"{folder} has {join(others)} but no tokenizer.json: transformers makes it "
            "with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return None, settings


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file of another program that holds an object.

    A byte order mark is skipped: editors on Windows put one there.

    Raises:
        ValueError: It holds something else; names it.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds a {type(data).__name__}, not an object")
    return data


def _read_text(file: Path) -> str:
    """Read UTF-8 as it is: line ends are not translated."""
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error


def _generation_eos_ids(file: Path, generation: Mapping[str, Any]) -> list[int]:
    value = generation.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in ids):
        raise ValueError(f"{file}: eos_token_id has the value {value!r}")
    return ids


def _tokenizer_eos_ids(
    folder: Path, tokenizer_json: str | None, settings: Mapping[str, Any]
) -> list[int]:
    if tokenizer_json is None:
        return []
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    eos_token = read_special_tokens(settings).get("eos_token")
    eos_id = None if eos_token is None else tokenizer.token_to_id(eos_token)
    return [] if eos_id is None else [eos_id]
