"""Every key of a config.json is used, harmless, or an error."""

import dataclasses
import json
from pathlib import Path

import pytest

from convert.hf_config import read_model_config, write_model_config
from jaxkv.config import ModelConfig, RopeScaling
from tests.convert.folders import TINY

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(*keys, **changes):
    return {key: value for key, value in TINY.items() if key not in keys} | changes


def test_a_llama_config_is_read_key_by_key():
    assert read_model_config(TINY) == ModelConfig(
        model_type="llama",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float32",
    )


def test_absent_keys_mean_the_defaults_of_hugging_faces_llama():
    config = read_model_config({"model_type": "llama"})
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_absent_keys_mean_the_defaults_of_hugging_faces_qwen(model_type):
    config = read_model_config({"model_type": model_type})
    assert (config.vocab_size, config.intermediate_size) == (151936, 22016)
    assert config.max_position_embeddings == 32768
    assert config.rms_norm_eps == 1e-6
    assert config.num_key_value_heads == 32
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert config.head_dim == 128


@pytest.mark.parametrize(
    ("data", "q_bias", "o_bias", "qk_norm"),
    [
        (without(), False, False, False),
        (without(attention_bias=True), True, True, False),
        (without("architectures", model_type="qwen2"), True, False, False),
        (without("architectures", model_type="qwen3"), False, False, True),
        (
            without("architectures", model_type="qwen3", attention_bias=True),
            True,
            True,
            True,
        ),
    ],
    ids=["llama", "llama_bias", "qwen2", "qwen3", "qwen3_bias"],
)
def test_biases_and_norms_follow_the_family(data, q_bias, o_bias, qk_norm):
    config = read_model_config(data)
    assert config.attention_bias is q_bias
    assert config.attention_output_bias is o_bias
    assert config.qk_norm is qk_norm


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [({}, 4), ({"head_dim": None}, 4), ({"head_dim": 128}, 128)],
    ids=["absent", "null", "explicit"],
)
def test_head_dim_is_read_before_it_is_derived(changes, head_dim):
    assert read_model_config(TINY | changes).head_dim == head_dim


def test_a_null_number_of_kv_heads_means_as_many_as_query_heads():
    assert (
        read_model_config(TINY | {"num_key_value_heads": None}).num_key_value_heads == 4
    )


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_transformers_4_scaling_is_read(key):
    linear = read_model_config(TINY | {"rope_scaling": {key: "linear", "factor": 4}})
    assert linear.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    llama3 = read_model_config(TINY | {"rope_scaling": {key: "llama3", **LLAMA3_ROPE}})
    assert llama3.rope_scaling == RopeScaling(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert llama3.rope_theta == 10000.0


@pytest.mark.parametrize(
    ("rope_parameters", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, None),
        ({"rope_theta": 5e5}, None),
        (
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            RopeScaling(rope_type="linear", factor=2.0),
        ),
        (
            {"rope_type": "llama3", "rope_theta": 500000, **LLAMA3_ROPE},
            RopeScaling(rope_type="llama3", **LLAMA3_ROPE),
        ),
    ],
    ids=["default", "no_type", "linear", "llama3"],
)
def test_transformers_5_parameters_are_read(rope_parameters, scaling):
    data = without("rope_theta", "torch_dtype", dtype="bfloat16")
    config = read_model_config(data | {"rope_parameters": rope_parameters})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == scaling
    assert config.dtype == "bfloat16"


def test_the_original_length_defaults_to_the_configs_own():
    rope = {"rope_type": "llama3"} | LLAMA3_ROPE
    del rope["original_max_position_embeddings"]
    config = read_model_config(TINY | {"rope_scaling": rope})
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position_embeddings == 64


def test_both_spellings_may_be_there_when_they_agree():
    both = TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    assert read_model_config(both).rope_theta == 10000.0
    both["rope_theta"] = 20000.0
    with pytest.raises(ValueError, match=r"two values for rope_theta: 10000 and 20000"):
        read_model_config(both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"pretraining_tp": 2}, r"pretraining_tp 2 is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not"),
        ({"rope_interleaved": True}, r"rope_interleaved True is not supported"),
        ({"sliding_window": 4096}, r"sliding_window 4096 is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types .*'sliding_attention'.* is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantization_config: quant_method 'gptq' is not supported",
        ),
        ({"residual_multiplier": 0.22}, r"unknown key 'residual_multiplier' .*0.22"),
        ({"logits_scaling": 8.0}, r"unknown key 'logits_scaling'"),
        ({"head_dim": 5}, r"head_dim 5 must be even"),
        ({"head_dim": "4"}, r"head_dim has the value '4'"),
        ({"vocab_size": None}, r"vocab_size has the value None"),
        ({"num_hidden_layers": True}, r"num_hidden_layers has the value True"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps has the value '1e-5'"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings has the value 'yes'"),
        ({"eos_token_id": "2"}, r"eos_token_id has the value '2'"),
        (
            {"eos_token_id": 40},
            r"eos_token_ids \[40\] lie outside the vocabulary of 40",
        ),
        ({"num_attention_heads": 3}, r"hidden_size 16 is not a multiple of .* 3"),
        ({"model_type": "granite"}, r"model_type 'granite' is not supported"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures \['LlamaForSequenceClassification'\] is not supported",
        ),
        ({"use_mrope": True}, r"use_mrope True is not supported \(only False\)"),
        ({"rope_theta": 10**400}, r"rope_theta has the value 1000"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps has the value 1000"),
        ({"rms_norm_eps": -1e-5}, r"rms_norm_eps has the value -1e-05"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps has the value nan"),
        ({"rms_norm_eps": float("inf")}, r"rms_norm_eps has the value inf"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_change_the_maths_is_an_error(changes, message):
    with pytest.raises(ValueError, match=r"^config.json: .*" + message):
        read_model_config(TINY | changes)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, r"rope_type 'yarn' is not supported"),
        ({"type": "dynamic", "factor": 4.0}, r"rope_type 'dynamic' is not supported"),
        ({"rope_type": "longrope"}, r"rope_type 'longrope' is not supported"),
        ({"rope_type": None}, r"rope_type None is not supported"),
        ({"rope_type": "linear"}, r"rope_type 'linear' needs factor"),
        ({"rope_type": "linear", "factor": "4"}, r"factor has the value '4'"),
        ({"rope_type": "linear", "factor": 1e999}, r"factor has the value inf"),
        ({"rope_type": "linear", "factor": 10**400}, r"factor has the value 1000"),
        (
            {"rope_type": "linear", "factor": 0},
            r"factor must be a finite number > 0, got 0",
        ),
        (
            {"rope_type": "linear", "factor": 4.0, "attention_factor": 2.0},
            r"rope_type 'linear' with unknown key 'attention_factor'",
        ),
        ({"factor": 4.0}, r"rope_type 'default' with unknown key 'factor'"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            r"unknown key 'partial_rotary_factor' \(value 0.5\)",
        ),
        (
            {"full_attention": {"rope_type": "default"}},
            r"unknown key 'full_attention'",
        ),
        ("linear", r"rope_scaling has the value 'linear'"),
    ],
)
def test_rope_that_we_do_not_compute_is_an_error(rope, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(TINY | {"rope_scaling": rope})


def test_one_error_lists_all_offenders():
    data = TINY | {"hidden_act": "relu", "mup": 1, "rope_scaling": {"type": "yarn"}}
    with pytest.raises(ValueError, match=r"hidden_act 'relu'.*'mup'.*'yarn'"):
        read_model_config(data)


def test_qwen_windows_are_an_error_only_when_used():
    qwen = without("architectures", model_type="qwen2", sliding_window=4096)
    qwen |= {"use_sliding_window": False, "max_window_layers": 21}
    assert read_model_config(qwen).model_type == "qwen2"
    with pytest.raises(ValueError, match=r"use_sliding_window True is not supported"):
        read_model_config(qwen | {"use_sliding_window": True})


def test_harmless_keys_are_ignored():
    harmless = {
        "_name_or_path": "somewhere",
        "transformers_version": "4.50.0",
        "initializer_range": 0.02,
        "attention_dropout": 0.1,
        "use_cache": False,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "temperature": 0.5,
        "quantization_config": None,
        "layer_types": ["full_attention", "full_attention"],
        "rope_interleaved": False,
        "use_mrope": False,
        "is_llama_config": True,
    }
    assert read_model_config(TINY | harmless) == read_model_config(TINY)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ({"eos_token_id": 5}, [5, 6, 7, 8], (5, 6, 7, 8)),
        ({"eos_token_id": [5, 6]}, [7], (5, 6, 7)),
        ({"eos_token_id": None}, [7, 8], (7, 8)),
        ({"eos_token_id": None}, [], ()),
        ({}, [7], (7,)),
        ({}, [], (2,)),
    ],
    ids=["int", "list", "null", "null_alone", "absent", "absent_alone"],
)
def test_every_end_of_sequence_id_counts(own, others, expected):
    data = without("eos_token_id") | own
    assert read_model_config(data, more_eos_ids=others).eos_token_ids == expected


@pytest.mark.parametrize(
    "data",
    [
        TINY,
        TINY | {"attention_bias": True, "mlp_bias": True, "head_dim": 8},
        TINY | {"tie_word_embeddings": True, "eos_token_id": [2, 3]},
        TINY | {"eos_token_id": None, "bos_token_id": None},
        TINY | {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        TINY | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        without("architectures", model_type="qwen2", torch_dtype="bfloat16"),
        without("architectures", model_type="qwen3", head_dim=8),
    ],
    ids=["llama", "bias", "tied", "no_eos", "llama3", "linear", "qwen2", "qwen3"],
)
def test_a_written_config_is_read_back_as_it_was(data):
    config = read_model_config(data)
    written = write_model_config(config)
    assert written["head_dim"] == config.head_dim
    assert read_model_config(written) == config


def test_kv_scales_are_no_part_of_a_written_config():
    config = read_model_config(TINY)
    scaled = dataclasses.replace(config, kv_scales=((0.5, 0.25), None))
    assert write_model_config(scaled) == write_model_config(config)


def test_arithmetic_that_hugging_face_has_no_name_for_is_not_exported():
    config = read_model_config(TINY)
    fields = config.to_json() | {"attention_bias": True, "qk_norm": True}
    odd = ModelConfig.from_json(fields)
    with pytest.raises(
        ValueError,
        match=r"llama cannot express attention_output_bias False; qk_norm True",
    ):
        write_model_config(odd)
    with pytest.raises(ValueError, match=r"cannot export model_type 'granite'"):
        write_model_config(ModelConfig.from_json(fields | {"model_type": "granite"}))


FIXTURES = sorted((Path(__file__).parents[1] / "fixtures/hf").glob("*/config_v*.json"))


@pytest.mark.parametrize("file", FIXTURES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_both_versions_of_transformers_describe_the_same_model(file):
    plain = json.loads((file.parent / "config.json").read_text())
    other = json.loads(file.read_text())
    assert read_model_config(other) == read_model_config(plain)
