"""A checkpoint is restored whole, or the difference is named."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from convert import convert_checkpoint
from jaxkv.device.llama import param_shapes
from jaxkv.engine.checkpoint import (
    group_by_bytes,
    iterate_params,
    load_config,
    load_params,
    load_tokenizer,
)
from tests.convert.folders import TINY, same_bits, tiny_tensors, write_folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A converted checkpoint, to be read only, and the tensors it was made from."""
    root = tmp_path_factory.mktemp("checkpoint")
    tensors = tiny_tensors()
    write_folder(root / "hf", tensors=tensors)
    convert_checkpoint(root / "hf", root / "out", progress=False)
    return root / "out", {n.removeprefix("model."): t for n, t in tensors.items()}


@pytest.fixture
def checkpoint(converted, tmp_path):
    """A copy of the converted checkpoint, to be broken."""
    shutil.copytree(converted[0], tmp_path / "out")
    return tmp_path / "out"


def test_parameters_are_device_arrays_in_the_order_of_the_forward_pass(converted):
    folder, tensors = converted
    config = load_config(folder)
    params = load_params(folder)
    assert list(params) == list(param_shapes(config))
    for name, array in params.items():
        assert isinstance(array, jax.Array)
        assert same_bits(array, tensors[name]), name


def test_a_relative_path_and_a_string_will_do(converted, monkeypatch):
    folder, _ = converted
    monkeypatch.chdir(folder.parent)
    assert load_config("out") == load_config(folder)
    assert load_params("out").keys() == load_params(folder).keys()


@pytest.mark.parametrize(
    "dtype", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)], ids=str
)
def test_a_dtype_is_cast_to_rounding_to_nearest_even(converted, dtype):
    folder, tensors = converted
    params = load_params(folder, dtype=dtype.name)
    assert all(same_bits(params[n], t.astype(dtype)) for n, t in tensors.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 3},
            r"layers.2.input_layernorm.weight is missing; .*layers.2.mlp.down_proj",
        ),
        (
            {"num_hidden_layers": 1},
            r"layers.1.input_layernorm.weight is not in the config",
        ),
        (
            {"hidden_size": 32},
            r"embed_tokens.weight is \[40, 16\], the config asks for \[40, 32\]",
        ),
        ({"tie_word_embeddings": True}, r"lm_head.weight is not in the config"),
        ({"mlp_bias": True}, r"layers.0.mlp.gate_proj.bias is missing"),
        (
            {"head_dim": 8},
            r"q_proj.weight is \[16, 16\], the config asks for \[32, 16\]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_config_is_an_error_that_names_the_difference(
    converted, changes, message
):
    folder, _ = converted
    other = dataclasses.replace(load_config(folder), **changes)
    with pytest.raises(
        ValueError, match=r"params does not fit the config: .*" + message
    ):
        load_params(folder, other)
    with pytest.raises(ValueError, match=message):
        next(iterate_params(folder, other))


def test_a_config_beside_other_parameters_is_an_error(checkpoint):
    data = json.loads((checkpoint / "config.json").read_text())
    data["model"]["intermediate_size"] = 48
    (checkpoint / "config.json").write_text(json.dumps(data))
    with pytest.raises(
        ValueError, match=r"gate_proj.weight is \[24, 16\], .* \[48, 16\]"
    ):
        load_params(checkpoint)


def test_iterating_gives_every_parameter_once(converted):
    folder, tensors = converted
    config = load_config(folder)
    read = list(iterate_params(folder, config))
    assert [name for name, _ in read] == list(param_shapes(config))
    assert all(same_bits(array, tensors[name]) for name, array in read)


def test_groups_hold_at_most_the_largest_or_32_mib():
    mib = 2**20
    assert group_by_bytes({}) == []
    sizes = {"a": 20 * mib, "b": 12 * mib, "c": 1, "d": 31 * mib, "e": mib}
    assert group_by_bytes(sizes) == [["a", "b"], ["c", "d"], ["e"]]
    sizes = {"a": 60 * mib, "b": 100 * mib, "c": 40 * mib, "d": 60 * mib, "e": 0}
    assert group_by_bytes(sizes) == [["a"], ["b"], ["c", "d", "e"]]


def test_what_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"it has no config.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(
        ValueError, match=r"config.json is not of a converted checkpoint: `jaxkv"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, r"has format_version 2, this version reads 1"),
        ({"model": None}, r"config.json: "),
        ({"model": {"vocab_size": 40}}, r"keys missing from the model config"),
    ],
)
def test_a_config_we_cannot_read_is_an_error(checkpoint, change, message):
    data = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(data | change))
    with pytest.raises(ValueError, match=message):
        load_config(checkpoint)


def test_missing_parameters_are_an_error(checkpoint):
    shutil.rmtree(checkpoint / "params/state")
    with pytest.raises(ValueError, match=r"params is broken"):
        load_params(checkpoint)
    shutil.rmtree(checkpoint / "params")
    with pytest.raises(ValueError, match=r"out has no params folder"):
        load_params(checkpoint)


def test_a_truncated_data_file_is_an_error(checkpoint):
    files = (checkpoint / "params").rglob("d/*")
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    # In a process of its own: Orbax closes its event loop before its other reads have
    # failed, and they complain whenever they are collected.
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, checkpoint],
        capture_output=True,
        text=True,
        check=True,
    )
    message = json.loads(done.stdout)
    assert message.startswith(f"{checkpoint}/params cannot be restored: ")
    assert "\n" not in message


_LOAD = """
import json, sys
from jaxkv.engine.checkpoint import load_params
try:
    load_params(sys.argv[1])
except ValueError as error:
    print(json.dumps(str(error)))
"""


def test_a_checkpoint_without_tokenizer_has_none(converted):
    assert load_tokenizer(converted[0]) is None


def test_a_broken_tokenizer_is_an_error(checkpoint):
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out/tokenizer.json is not a tokenizer.json"):
        load_tokenizer(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json holds a list"):
        load_tokenizer(checkpoint)
