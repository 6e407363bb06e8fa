"""Calibrated KV scales arrive as they are stored; other quantisation is an error."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert import convert_checkpoint
from convert.hf_config import read_model_config
from jaxkv.engine.checkpoint import load_config, load_params
from tests.convert.folders import (
    DTYPES,
    TINY,
    assert_untouched,
    same_bits,
    tiny_tensors,
    write_folder,
)

LLM_COMPRESSOR = ("self_attn.k_scale", "self_attn.v_scale")
MODELOPT = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
# As written by llm-compressor (compressed-tensors 0.14) for the KV cache alone, and by
# ModelOpt: new, and with the sidecar's keys.
COMPRESSED_SCHEME = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": None,
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
COMPRESSED = {
    "config_groups": {},
    "format": "dense",
    "global_compression_ratio": None,
    "ignore": ["model.layers.0.self_attn.q_proj", "lm_head"],
    "kv_cache_scheme": COMPRESSED_SCHEME,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.14.0",
}
MODELOPT_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT_CONFIG = {
    "ignore": ["lm_head"],
    "kv_cache_scheme": MODELOPT_SCHEME,
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_method": "modelopt",
}
MODELOPT_FLAT = {
    "quant_method": "modelopt",
    "quant_algo": None,
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"],
}


def scale(value, dtype=np.float32, shape=(1,)):
    return np.full(shape, value, dtype)


def scale_tensors(layer, names=LLM_COMPRESSOR, values=(0.03125, 0.1), **options):
    """Tensors of one layer's two scales."""
    return {
        f"model.layers.{layer}.{name}": scale(value, **options)
        for name, value in zip(names, values, strict=True)
    }


def convert(tmp_path, config=TINY, num_shards=1, dtype="auto", **tensors):
    """Convert a tiny folder with more tensors; return its config and parameters."""
    all_tensors = tiny_tensors(config) | tensors
    write_folder(tmp_path / "hf", config, all_tensors, num_shards)
    return convert_again(tmp_path, dtype)


def convert_again(tmp_path, dtype="auto"):
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", dtype=dtype, progress=False)
    return load_config(tmp_path / "out"), load_params(tmp_path / "out")


def refuse(tmp_path, message, config=TINY, **tensors):
    """Assert that a folder with these tensors is refused in one sentence."""
    with pytest.raises(ValueError, match=message) as caught:
        convert(tmp_path, config, **tensors)
    assert "\n" not in str(caught.value)
    assert_untouched(tmp_path, "hf")
    return str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("names", [LLM_COMPRESSOR, MODELOPT], ids=["plain", "proj"])
def test_both_common_names_are_read(tmp_path, names, num_shards):
    tensors = scale_tensors(0, names, (0.03125, 0.1), shape=())
    tensors |= scale_tensors(1, names, (1.0, 3e-30))
    model, params = convert(tmp_path, num_shards=num_shards, **tensors)
    tenth, small = float(np.float32(0.1)), float(np.float32(3e-30))
    assert tenth != 0.1
    assert model.kv_scales == ((0.03125, tenth), (1.0, small))
    assert params.keys() == {name.removeprefix("model.") for name in tiny_tensors()}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("params_dtype", ["bfloat16", "float16", "float32"])
def test_scales_have_a_dtype_of_their_own(tmp_path, params_dtype, stored):
    tensors = tiny_tensors(dtype=DTYPES[params_dtype])
    scales = scale_tensors(0, values=(0.1, 300.7), dtype=DTYPES[stored])
    write_folder(tmp_path / "hf", TINY | {"torch_dtype": None}, tensors | scales)
    model, params = convert_again(tmp_path)
    assert model.dtype == params_dtype
    expected = tuple(float(array[0]) for array in scales.values())
    assert model.kv_scales == (expected, None)
    name = "layers.0.self_attn.k_proj.weight"
    assert same_bits(params[name], tensors[f"model.{name}"])


def test_another_dtype_of_the_parameters_leaves_scales_alone(tmp_path):
    tensors = scale_tensors(1, values=(1e-7, 1e6))  # neither is a float16
    model, _ = convert(tmp_path, dtype="float16", **tensors)
    assert model.dtype == "float16"
    assert model.kv_scales == (None, (float(np.float32(1e-7)), 1e6))


def test_each_layer_may_have_its_own_name_or_no_scales(tmp_path):
    config = TINY | {"num_hidden_layers": 12}
    tensors = scale_tensors(1, MODELOPT, (0.25, 0.5)) | scale_tensors(11, values=(2, 4))
    model, _ = convert(tmp_path, config, **tensors)
    expected = [None] * 12
    expected[1], expected[11] = (0.25, 0.5), (2.0, 4.0)
    assert model.kv_scales == tuple(expected)


def test_a_folder_without_scales_has_none(tmp_path):
    model, _ = convert(tmp_path, TINY | {"quantization_config": COMPRESSED})
    assert model.kv_scales == ()


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("names", [LLM_COMPRESSOR, MODELOPT], ids=["plain", "proj"])
def test_one_scale_of_two_is_an_error(tmp_path, names, missing):
    lost = f"model.layers.1.{names[missing]}"
    tensors = scale_tensors(0, names) | scale_tensors(1, names)
    del tensors[lost]
    there = f"model.layers.1.{names[1 - missing]}"
    refuse(tmp_path, rf"hf: {there} is there, but {lost} is missing$", **tensors)


def test_both_names_in_one_layer_are_an_error(tmp_path):
    message = refuse(
        tmp_path,
        r"are two names for one thing$",
        **scale_tensors(1),
        **scale_tensors(1, MODELOPT),
    )
    for name in (*LLM_COMPRESSOR, *MODELOPT):
        assert f"model.layers.1.{name}" in message


def test_one_name_for_k_and_another_for_v_are_an_error(tmp_path):
    names = (LLM_COMPRESSOR[0], MODELOPT[1])
    refuse(
        tmp_path,
        r"0.self_attn.k_scale and model.layers.0.self_attn.v_proj.v_scale are two",
        **scale_tensors(0, names),
    )


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (1, 1), (0,)])
def test_a_scale_for_each_head_is_an_error(tmp_path, shape):
    tensors = scale_tensors(0)
    tensors["model.layers.0.self_attn.v_scale"] = scale(0.5, shape=shape)
    refuse(
        tmp_path,
        r"hf: model.layers.0.self_attn.v_scale has shape \[.*\]; only one for a layer",
        **tensors,
    )


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan, np.inf, -np.inf, 2.0**-127])
@pytest.mark.parametrize("index", [0, 1])
def test_a_scale_that_scales_nothing_is_an_error(tmp_path, index, value):
    name = f"model.layers.1.{MODELOPT[index]}"
    tensors = scale_tensors(1, MODELOPT) | {name: scale(value)}
    refuse(
        tmp_path, rf"hf: {name} is {value!r}, not a number from .*e-38 to", **tensors
    )


@pytest.mark.parametrize(
    "dtype", [np.float64, np.int32, np.uint8, ml_dtypes.float8_e4m3fn]
)
def test_a_scale_of_another_dtype_is_an_error(tmp_path, dtype):
    refuse(
        tmp_path,
        rf"hf: model.layers.0.self_attn.k_scale has dtype {np.dtype(dtype).name}; only",
        **scale_tensors(0, values=(1, 1), dtype=dtype),
    )


def test_one_error_lists_all_offenders(tmp_path):
    tensors = scale_tensors(0, values=(0.0, 1.0)) | scale_tensors(1)
    del tensors["model.layers.1.self_attn.k_scale"]
    refuse(tmp_path, r"0.self_attn.k_scale is 0.0.*1.self_attn.v_scale is", **tensors)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_scale",
        "model.layers.0.self_attn.kv_scale",
        "model.layers.0.self_attn.prob_scale",
        "model.layers.0.self_attn.attn.k_scale",
        "model.layers.0.self_attn.k_proj.v_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_zero_point",
        "model.layers.0.mlp.k_scale",
        "model.layers.2.self_attn.k_scale",  # there are two layers
        "layers.0.self_attn.k_scale",
    ],
)
def test_other_scales_are_unknown_tensors(tmp_path, name):
    refuse(
        tmp_path,
        rf"; {name} is not a tensor of this|: {name} is not a tensor of this model$",
        **scale_tensors(0),
        **{name: scale(0.5)},
    )


@pytest.mark.parametrize(
    "value",
    [
        COMPRESSED,
        COMPRESSED | {"config_groups": None},
        {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
        MODELOPT_CONFIG,
        MODELOPT_CONFIG | {"kv_cache_scheme": "FP8"},
        MODELOPT_FLAT,
        MODELOPT_FLAT | {"kv_cache_scheme": MODELOPT_SCHEME},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
    ids=[
        "compressed",
        "null_groups",
        "compressed_short",
        "modelopt",
        "modelopt_old",
        "modelopt_flat",
        "modelopt_both",
        "modelopt_short",
    ],
)
def test_a_config_for_the_cache_alone_is_allowed(value):
    assert read_model_config(TINY | {"quantization_config": value}) == (
        read_model_config(TINY)
    )


GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp8", r" 'fp8' is not supported \(only None\)"),
        ({}, r": quant_method None is not supported \(only 'compressed-tensors' and"),
        (COMPRESSED | {"quant_method": ["x"]}, r": quant_method \['x'\] is not"),
        (COMPRESSED | {"quant_method": "fp8"}, r": quant_method 'fp8' is not supp"),
        (COMPRESSED | {"config_groups": GROUPS}, r": config_groups {'group_0': .* is"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, r": transform_config {'R1': "),
        (COMPRESSED | {"sparsity_config": {"format": "x"}}, r": sparsity_config {'fo"),
        (COMPRESSED | {"kv_cache_scheme": None}, r": kv_cache_scheme None is not"),
        (COMPRESSED | {"kv_cache_scheme": "FP8"}, r": kv_cache_scheme 'FP8' is not"),
        (COMPRESSED | {"kv_cache_quant_algo": "FP8"}, r": unknown key 'kv_cache_qua"),
        (COMPRESSED | {"bits": 4}, r": unknown key 'bits' \(value 4\)"),
        (MODELOPT_FLAT | {"quant_algo": "FP8"}, r": quant_algo 'FP8' is not supp"),
        (
            MODELOPT_FLAT | {"kv_cache_quant_algo": "NVFP4"},
            r": kv_cache_quant_algo 'NV",
        ),
        (MODELOPT_FLAT | {"kv_cache_quant_algo": None}, r": kv_cache_quant_algo is mi"),
        (
            MODELOPT_FLAT | {"quantized_layers": {"a": 1}},
            r": quantized_layers {'a': 1}",
        ),
        (MODELOPT_CONFIG | {"config_groups": GROUPS}, r": config_groups {'group_0'"),
        (MODELOPT_CONFIG | {"kv_cache_scheme": "INT8"}, r": kv_cache_scheme 'INT8' is"),
        (MODELOPT_CONFIG | {"alpha": None}, r": unknown key 'alpha' \(value None\)"),
    ],
)
def test_anything_else_is_an_error_that_names_it(value, message):
    with pytest.raises(
        ValueError, match=r"^config.json: quantization_config" + message
    ):
        read_model_config(TINY | {"quantization_config": value})


@pytest.mark.parametrize("config", [COMPRESSED, MODELOPT_CONFIG], ids=["c", "m"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_bits", 4, r"num_bits 4 is not supported \(only 8\)"),
        ("num_bits", None, r"num_bits None is not supported"),
        ("type", "int", r"type 'int' is not supported \(only 'float'\)"),
        ("symmetric", False, r"symmetric False is not supported"),
        ("strategy", "attn_head", r"strategy 'attn_head' is not supported"),
        ("strategy", "token", r"strategy 'token' is not supported \(only 'tensor'\)"),
        ("dynamic", True, r"dynamic True is not supported"),
        ("dynamic", "local", r"dynamic 'local' is not supported"),
        ("group_size", 64, r"group_size 64 is not supported"),
        ("block_structure", [8, 8], r"block_structure \[8, 8\] is not supported"),
        ("offset", 1, r"unknown key 'offset' \(value 1\)"),
    ],
)
def test_only_static_float8_scales_of_whole_tensors_are_read(
    config, key, value, message
):
    scheme = config["kv_cache_scheme"] | {key: value}
    with pytest.raises(
        ValueError, match=r"quantization_config: kv_cache_scheme: " + message
    ):
        read_model_config(
            TINY | {"quantization_config": config | {"kv_cache_scheme": scheme}}
        )


@pytest.mark.parametrize("key", ["num_bits", "type"])
def test_a_scheme_says_its_bits_and_its_type(key):
    scheme = {name: x for name, x in COMPRESSED_SCHEME.items() if name != key}
    config = TINY | {"quantization_config": COMPRESSED | {"kv_cache_scheme": scheme}}
    with pytest.raises(ValueError, match=rf"kv_cache_scheme: {key} is missing"):
        read_model_config(config)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": ["a"]},
        {"quant_algo": None, "kv_cache_quant_algo": None},
    ],
    ids=["fp8", "none"],
)
def test_modelopts_own_file_may_describe_the_cache(tmp_path, quantization):
    write_folder(tmp_path / "hf", tensors=tiny_tensors() | scale_tensors(0, MODELOPT))
    data = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf/hf_quant_config.json").write_text(json.dumps(data))
    model, _ = convert_again(tmp_path)
    assert model.kv_scales == ((0.03125, float(np.float32(0.1))), None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}},
            r"kv_cache_quant_algo 'NVFP4' is not supported \(only 'FP8'\)",
        ),
        (
            {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
            r"quant_algo 'NVFP4' is not supported \(only None\)",
        ),
        (
            {"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"},
            r"kv_cache_scheme 'NVFP4' is not supported",
        ),
        ({"quantization": 8}, r"quantization has the value 8"),
    ],
    ids=["nvfp4", "weights", "flat", "number"],
)
def test_scales_that_modelopts_file_gives_another_meaning_are_an_error(
    tmp_path, data, message
):
    write_folder(tmp_path / "hf", tensors=tiny_tensors() | scale_tensors(0, MODELOPT))
    (tmp_path / "hf/hf_quant_config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"hf/hf_quant_config.json: .*" + message):
        convert_again(tmp_path)
    assert_untouched(tmp_path, "hf")
