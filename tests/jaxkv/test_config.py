"""The configs: what they refuse, in which words, and their way through JSON."""

import dataclasses
import json
import re

import pytest

from jaxkv import CacheConfig, EngineConfig, ModelConfig, RopeScaling
from jaxkv.config import DTYPES
from jaxkv.kv_format import KVFormat
from tests.helpers import cache_config


def model_config(**changes):
    defaults = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**(defaults | changes))


KV_CACHE_DTYPES = (
    "kv_cache_dtype must be one of ('auto', 'float32', 'bfloat16', 'float16', 'int8', "
    "'fp8_e4m3', 'fp8_e5m2', 'fp8_e4m3_static', 'fp8_e5m2_static', 'int4', "
    "'int4_asymmetric'), or two of them as 'K:V'"
)

MAKERS = {"model": model_config, "cache": cache_config, "engine": EngineConfig}

POSITIVE = {
    "model": (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ),
    "cache": ("num_layers", "num_kv_heads", "head_dim", "num_blocks", "block_size"),
    "engine": (
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_partial_prefills",
        "num_blocks",
        "max_model_len",
    ),
}


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"], ids=repr)
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in POSITIVE for name in POSITIVE[kind]]
)
def test_sizes_must_be_positive_integers(kind, name, value):
    message = f"{name} must be a positive integer, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MAKERS[kind](**{name: value})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "model",
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads 6 must be a multiple of num_key_value_heads 4",
        ),
        ("model", {"head_dim": 7}, "head_dim 7 must be even"),
        (
            "model",
            {"rope_theta": 0.0},
            "rope_theta must be a finite number > 0, got 0.0",
        ),
        (
            "model",
            {"rope_theta": float("inf")},
            "rope_theta must be a finite number > 0, got inf",
        ),
        (
            "model",
            {"rope_theta": float("nan")},
            "rope_theta must be a finite number > 0, got nan",
        ),
        (
            "model",
            {"dtype": "int8"},
            "dtype must be float32, bfloat16 or float16, got 'int8'",
        ),
        (
            "model",
            {"eos_token_ids": (2, 128, -1)},
            "eos_token_ids [128, -1] lie outside the vocabulary of 128",
        ),
        *(
            (
                "model",
                {"kv_scales": value},
                "kv_scales must be empty or a tuple of 2 entries, one a layer and not "
                f"all None, got {value!r}",
            )
            for value in (
                ((0.5, 0.5),),
                ((0.5, 0.5),) * 3,
                (None, None),
                [(0.5, 0.5), None],
                None,
                0.5,
            )
        ),
        *(
            (
                kind,
                {"kv_scales": (None, pair)},
                f"kv_scales of layer 1 must be None or two floats from {2.0**-126} to "
                f"{2.0**100}, got {pair!r}",
            )
            for kind in ("model", "cache")
            for pair in (
                (0.5,),
                (0.5, None),
                (0.5, 0.0),
                (-0.5, 0.5),
                (0.5, float("nan")),
                (2.0**-127, 0.5),
                (0.5, 1e31),
                (float("inf"), 0.5),
                (1, 0.5),
                (0.5, "1"),
                [0.5, 0.5],
                0.5,
            )
        ),
        (
            "cache",
            {"num_blocks": 1},
            "num_blocks must be at least 2 (block 0 is the null block), got 1",
        ),
        (
            "cache",
            {"num_blocks": 2**27, "block_size": 16},
            "num_blocks 134217728 * block_size 16 slots do not fit below 2**31: slots "
            "are int32",
        ),
        (
            "cache",
            {"kv_cache_dtype": "int4:int4:int4"},
            f"{KV_CACHE_DTYPES}, got 'int4:int4:int4'",
        ),
        (
            "engine",
            {"dtype": "float64"},
            "dtype must be one of ('auto', 'float32', 'bfloat16', 'float16'), got "
            "'float64'",
        ),
        (
            "engine",
            {"kv_cache_dtype": "int8:int3"},
            f"{KV_CACHE_DTYPES}, got 'int8:int3'",
        ),
        *(
            (kind, {"kv_cache_dtype": value}, f"{KV_CACHE_DTYPES}, got {value!r}")
            for kind in ("cache", "engine")
            for value in ("", "int8:", "INT8", None, 8, ["int8"])
        ),
        *(
            (
                kind,
                {f"{prefix}skip_layers": value},
                f"{prefix}skip_layers must be a tuple of layer indices, got {value!r}",
            )
            for kind, prefix in (("cache", ""), ("engine", "kv_cache_"))
            for value in (0, [0], (True,), (-1,), (0.0,), ("0",), None)
        ),
        *(
            (
                kind,
                {f"{prefix}rotation": value, "kv_cache_dtype": "int4"},
                f"{prefix}rotation must be True or False, got {value!r}",
            )
            for kind, prefix in (("cache", ""), ("engine", "kv_cache_"))
            for value in (1, "yes", None)
        ),
        *(
            (
                kind,
                {f"{prefix}rotation": True, "kv_cache_dtype": "int8:fp8_e4m3"},
                f"{prefix}rotation is for vectors of 4 bits, and kv_cache_dtype "
                "'int8:fp8_e4m3' has none",
            )
            for kind, prefix in (("cache", ""), ("engine", "kv_cache_"))
        ),
        ("cache", {"dtype": "int8"}, f"dtype must be one of {DTYPES}, got 'int8'"),
        (
            "cache",
            {"skip_layers": (0, 2, 7)},
            "skip_layers [2, 7] are outside the cache's 2 layers",
        ),
        (
            "cache",
            {"kv_cache_dtype": "int8:int4", "head_dim": 7},
            "head_dim 7 must be even for vectors of 4 bits",
        ),
        (
            "cache",
            {"kv_scales": [(1.0, 1.0), None]},
            "kv_scales must be empty or a tuple of 2 entries, one a layer and not all "
            "None, got [(1.0, 1.0), None]",
        ),
        (
            "cache",
            {"kv_cache_dtype": "int8:fp8_e5m2_static", "kv_scales": ((1.0, 2.0), None)},
            "kv_cache_dtype 'int8:fp8_e5m2_static' needs calibrated scales, and layers "
            "[1] have none: skip those layers, or take a format that computes its "
            "scales",
        ),
        (
            "engine",
            {"policy": "lifo"},
            "policy must be one of ('fcfs', 'priority'), got 'lifo'",
        ),
        (
            "engine",
            {"preemption": "never"},
            "preemption must be one of ('auto', 'swap', 'recompute'), got 'never'",
        ),
        *(
            (
                "engine",
                {"swap_space": value},
                f"swap_space must be in [0, 2**20] GiB, got {value!r}",
            )
            for value in (-1, True, "1", 1e300, float("nan"), None)
        ),
        (
            "engine",
            {"preemption": "swap"},
            "preemption 'swap' needs a swap_space, got 0 GiB",
        ),
        (
            "engine",
            {"swap_bandwidth": 0},
            "swap_bandwidth must be a finite number > 0, got 0",
        ),
        (
            "engine",
            {"prefill_rate": float("inf")},
            "prefill_rate must be a finite number > 0, got inf",
        ),
        (
            "engine",
            {"warmup": "hot"},
            "warmup must be one of ('eager', 'lazy'), got 'hot'",
        ),
        (
            "engine",
            {"attention_implementation": "cuda"},
            "attention_implementation must be one of ('auto', 'xla', 'mosaic_gpu', "
            "'cpu', 'reference'), got 'cuda'",
        ),
        (
            "engine",
            {"memory_fraction": 0.0},
            "memory_fraction must be in (0, 1], got 0.0",
        ),
        (
            "engine",
            {"memory_fraction": 1.1},
            "memory_fraction must be in (0, 1], got 1.1",
        ),
        (
            "engine",
            {"max_num_batched_tokens": 31, "max_num_seqs": 32},
            "max_num_batched_tokens 31 must be at least max_num_seqs 32: every running "
            "request gets a token in every step",
        ),
        (
            "engine",
            {"long_prefill_token_threshold": -1},
            "long_prefill_token_threshold must be an integer >= 0, got -1",
        ),
        (
            "engine",
            {"long_prefill_token_threshold": 1.5},
            "long_prefill_token_threshold must be an integer >= 0, got 1.5",
        ),
        ("engine", {"seed": -1}, "seed must be an integer in [0, 2**32), got -1"),
        (
            "engine",
            {"seed": 2**32},
            "seed must be an integer in [0, 2**32), got 4294967296",
        ),
        ("engine", {"seed": 0.5}, "seed must be an integer in [0, 2**32), got 0.5"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(kind, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MAKERS[kind](**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_type": "yarn", "factor": 2.0},
            "rope_type must be 'linear' or 'llama3', got 'yarn'",
        ),
        (
            {"rope_type": "linear", "factor": 0.0},
            "factor must be a finite number > 0, got 0.0",
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 0,
            },
            "original_max_position_embeddings must be a positive integer, got 0",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0},
            "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, got 4.0 "
            "and 4.0",
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.0},
            "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, got 0.0 "
            "and 4.0",
        ),
    ],
)
def test_rope_scaling_out_of_range_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RopeScaling(**changes)


def test_linear_rope_scaling_does_not_look_at_the_fields_of_llama3():
    RopeScaling(rope_type="linear", factor=2.0, low_freq_factor=9.0)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_misspelt_field_is_a_type_error(kind):
    with pytest.raises(TypeError, match="block_sizes"):
        MAKERS[kind](block_sizes=16)


@pytest.mark.parametrize("kind", MAKERS)
def test_configs_are_frozen_hashable_and_equal_by_value(kind):
    config = MAKERS[kind]()
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)
    assert {config: "found"}[MAKERS[kind]()] == "found"


def test_the_limits_themselves_are_allowed():
    assert cache_config(num_blocks=2).num_blocks == 2
    assert cache_config(num_blocks=2**27 - 1, block_size=16)
    assert EngineConfig(memory_fraction=1.0, seed=2**32 - 1)
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=8)
    assert model_config(eos_token_ids=(0, 127), num_key_value_heads=4)


@pytest.mark.parametrize(
    ("dtype", "bytes_per_element"), [("float32", 4), ("bfloat16", 2), ("float16", 2)]
)
def test_bytes_of_a_cache(dtype, bytes_per_element):
    config = CacheConfig(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        num_blocks=10,
        block_size=4,
        kv_cache_dtype=dtype,
    )
    assert config.bytes_per_token == 2 * 3 * 2 * 8 * bytes_per_element
    assert config.bytes_per_block == 4 * config.bytes_per_token
    assert config.total_bytes == 10 * config.bytes_per_block


@pytest.mark.parametrize(
    ("kv_cache_dtype", "head_dim", "expected"),
    [
        ("bfloat16", 128, 256),
        ("int8", 128, 132),
        ("fp8_e4m3", 128, 132),
        ("fp8_e5m2", 128, 132),
        ("int4", 128, 72),
        ("int4_asymmetric", 128, 80),
        ("int8", 64, 68),
        ("fp8_e4m3", 64, 68),
        ("int4", 64, 36),
        ("int4_asymmetric", 64, 40),
        ("int4", 80, 40 + 3 * 2),  # groups of 32, 32 and 16
        ("int4", 96, 48 + 3 * 2),
        ("int4_asymmetric", 80, 40 + 3 * 4),
    ],
)
def test_bytes_of_a_vector_count_its_scales(kv_cache_dtype, head_dim, expected):
    config = cache_config(kv_cache_dtype=kv_cache_dtype, head_dim=head_dim)
    both = 2
    assert config.bytes_per_token == both * 2 * 2 * expected
    # What issue 5 asks for, against bfloat16.
    if head_dim == 128:
        smallest = {"bfloat16": 1, "int4": 3.5, "int4_asymmetric": 3.2}
        assert 256 / expected >= smallest.get(kv_cache_dtype, 1.93)


def test_b147_bytes_of_low_bit_llama_3_8b():
    sizes = {
        name: CacheConfig(
            num_layers=32,
            num_kv_heads=8,
            head_dim=128,
            num_blocks=2,
            kv_cache_dtype=name,
        ).bytes_per_token
        for name in ("bfloat16", "int8", "int4", "int8:int4")
    }
    assert sizes == {
        "bfloat16": 131_072,
        "int8": 2 * 32 * 8 * 132,
        "int4": 2 * 32 * 8 * 72,
        "int8:int4": 32 * 8 * (132 + 72),
    }


def test_formats_of_keys_and_values_of_each_layer():
    config = cache_config(
        num_layers=3,
        kv_cache_dtype="int4:fp8_e4m3_static",
        dtype="bfloat16",
        skip_layers=(1,),
        rotation=True,
        kv_scales=((0.5, 2.0), None, (0.25, 3.0)),
    )
    keys = KVFormat("int4", is_rotated=True)
    assert config.formats == (
        (keys, KVFormat("fp8_e4m3_static", scale=2.0)),
        (KVFormat("bfloat16"), KVFormat("bfloat16")),
        (keys, KVFormat("fp8_e4m3_static", scale=3.0)),
    )
    assert config.bytes_per_token == 2 * (2 * (4 + 2) + 2 * 8 + 2 * 8 * 2)


def test_auto_is_the_models_dtype_for_one_side_too():
    config = cache_config(kv_cache_dtype="int8:auto", dtype="float16")
    assert config.formats[0] == (KVFormat("int8"), KVFormat("float16"))


def test_pools_whose_bytes_mean_something_else_have_other_roots():
    changes = [
        {},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_dtype": "int4:int8"},
        {"kv_cache_dtype": "int8:int4"},
        {"kv_cache_dtype": "int4", "rotation": True},
        {"kv_cache_dtype": "int4", "skip_layers": (0,)},
        {"kv_cache_dtype": "int4", "skip_layers": (1,)},
        {"kv_cache_dtype": "int4", "skip_layers": (1,), "dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3_static", "kv_scales": ((0.5, 0.5),) * 2},
        {"kv_cache_dtype": "fp8_e4m3_static", "kv_scales": ((0.5, 0.25),) * 2},
        {"block_size": 8},
        {"head_dim": 16},
        {"num_kv_heads": 4},
        {"num_layers": 3},
    ]
    roots = [cache_config(**change).block_root for change in changes]
    assert len(set(roots)) == len(changes)
    assert cache_config(num_blocks=9).block_root == roots[0]


# JSON


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_ids": (2, 5), "bos_token_id": 1, "dtype": "bfloat16"},
        {"rope_scaling": RopeScaling(rope_type="linear", factor=2.5)},
        {
            "rope_scaling": RopeScaling(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.5,
                high_freq_factor=3.5,
                original_max_position_embeddings=64,
            ),
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-6,
        },
        {
            "model_type": "qwen3",
            "tie_word_embeddings": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "qk_norm": True,
        },
        # float32's 0.1, its smallest number and its largest
        {"kv_scales": (None, (0.10000000149011612, 2.0**-126))},
        {"kv_scales": ((2.0**100, 1.0), (0.5, 448.0))},
    ],
    ids=["plain", "eos", "linear", "llama3", "flags", "kv_scales", "all_kv_scales"],
)
def test_a_model_config_survives_json(changes):
    config = model_config(**changes)
    text = json.dumps(config.to_json(), allow_nan=False)
    restored = ModelConfig.from_json(json.loads(text))
    assert restored == config
    assert hash(restored) == hash(config)


def test_from_json_names_unknown_keys():
    data = model_config().to_json() | {"sliding_window": 4, "alpha": 1}
    message = r"^unknown keys in the model config: \['alpha', 'sliding_window'\]$"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(data)


def test_from_json_names_missing_keys():
    data = model_config().to_json()
    del data["vocab_size"], data["head_dim"]
    message = r"^keys missing from the model config: \['head_dim', 'vocab_size'\]$"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(data)


def test_from_json_takes_defaults_for_keys_that_have_one():
    data = model_config().to_json()
    for field in dataclasses.fields(ModelConfig):
        if field.default is not dataclasses.MISSING:
            del data[field.name]
    assert ModelConfig.from_json(data) == model_config()


def test_from_json_checks_values_and_changes_nothing_of_its_argument():
    data = model_config(eos_token_ids=(3,)).to_json() | {"head_dim": 3}
    before = json.dumps(data)
    with pytest.raises(ValueError, match="head_dim 3 must be even"):
        ModelConfig.from_json(data)
    assert json.dumps(data) == before


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
            r"unknown keys in rope_scaling: \['beta_fast'\]",
        ),
        ({"rope_type": "linear"}, r"keys missing from rope_scaling: \['factor'\]"),
        ("linear", "rope_scaling must be an object or null, got 'linear'"),
    ],
)
def test_from_json_refuses_a_rope_scaling_it_does_not_know(scaling, message):
    data = model_config().to_json() | {"rope_scaling": scaling}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(data)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rms_norm_eps", "x", "rms_norm_eps must be a finite number > 0, got 'x'"),
        ("rms_norm_eps", -1.0, "rms_norm_eps must be a finite number > 0, got -1.0"),
        ("rope_theta", float("inf"), "rope_theta must be a finite number > 0"),
        ("tie_word_embeddings", "no", "tie_word_embeddings must be true or false"),
        ("bos_token_id", "x", "bos_token_id must be a token id or null, got 'x'"),
        ("kv_scales", [[0.5, 0.5]], "kv_scales must be empty or a tuple of 2 entries"),
        ("kv_scales", "x", "kv_scales must be empty or a tuple of 2 entries"),
        ("kv_scales", [None, [0.5, "x"]], "kv_scales of layer 1 must be None or two"),
        ("kv_scales", [0.5, None], "kv_scales of layer 0 must be None or two"),
    ],
)
def test_from_json_refuses_values_of_a_wrong_kind(field, value, message):
    data = model_config().to_json() | {field: value}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(data)
