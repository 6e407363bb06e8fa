"""The decoder apart from any cache: parameters, rotary embedding, forward pass."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ModelConfig, RopeScaling
from jaxkv.device.llama import (
    apply_rope,
    check_params,
    init_params,
    merge,
    param_shapes,
    rope_frequencies,
    split,
)
from jaxkv.testing import tiny_llama
from tests.helpers import dense_logits

FIXTURES = Path(__file__).parents[2] / "fixtures" / "hf"
OPTIONS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
}


# Names and shapes


def test_param_shapes_of_an_untied_model_without_options():
    _, config = tiny_llama(num_hidden_layers=1)
    assert list(param_shapes(config).items()) == [
        ("embed_tokens.weight", (128, 32)),
        ("layers.0.input_layernorm.weight", (32,)),
        ("layers.0.self_attn.q_proj.weight", (32, 32)),
        ("layers.0.self_attn.k_proj.weight", (16, 32)),
        ("layers.0.self_attn.v_proj.weight", (16, 32)),
        ("layers.0.self_attn.o_proj.weight", (32, 32)),
        ("layers.0.post_attention_layernorm.weight", (32,)),
        ("layers.0.mlp.gate_proj.weight", (64, 32)),
        ("layers.0.mlp.up_proj.weight", (64, 32)),
        ("layers.0.mlp.down_proj.weight", (32, 64)),
        ("norm.weight", (32,)),
        ("lm_head.weight", (128, 32)),
    ]


@pytest.mark.parametrize(
    ("options", "added", "removed"),
    [
        ({"tie_word_embeddings": True}, {}, {"lm_head.weight"}),
        (
            {"attention_bias": True},
            {
                "layers.0.self_attn.q_proj.bias": (32,),
                "layers.0.self_attn.k_proj.bias": (16,),
                "layers.0.self_attn.v_proj.bias": (16,),
            },
            set(),
        ),
        (
            {"attention_output_bias": True},
            {"layers.0.self_attn.o_proj.bias": (32,)},
            set(),
        ),
        (
            {"mlp_bias": True},
            {
                "layers.0.mlp.gate_proj.bias": (64,),
                "layers.0.mlp.up_proj.bias": (64,),
                "layers.0.mlp.down_proj.bias": (32,),
            },
            set(),
        ),
        (
            {"qk_norm": True},
            {
                "layers.0.self_attn.q_norm.weight": (8,),
                "layers.0.self_attn.k_norm.weight": (8,),
            },
            set(),
        ),
    ],
    ids=["tied", "qkv bias", "output bias", "mlp bias", "qk_norm"],
)
def test_an_option_adds_and_removes_its_parameters_and_no_others(
    options, added, removed
):
    plain = param_shapes(tiny_llama(num_hidden_layers=1)[1])
    shapes = param_shapes(tiny_llama(num_hidden_layers=1, **options)[1])
    assert {n: s for n, s in shapes.items() if n not in plain} == added
    assert plain.keys() - shapes.keys() == removed
    assert all(shapes[name] == plain[name] for name in plain.keys() - removed)


def test_head_dim_need_not_be_hidden_size_over_heads():
    shapes = param_shapes(tiny_llama(head_dim=12)[1])
    assert shapes["layers.1.self_attn.q_proj.weight"] == (48, 32)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (24, 32)
    assert shapes["layers.1.self_attn.o_proj.weight"] == (32, 48)


# Merge, split and check


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_split_gives_back_the_very_arrays_that_merge_was_given(options):
    params, config = tiny_llama(**options)
    result = split(merge(config, params))
    assert list(result) == list(param_shapes(config))
    for name, value in result.items():
        np.testing.assert_array_equal(value, params[name])
        assert value.unsafe_buffer_pointer() == params[name].unsafe_buffer_pointer()


def test_layers_beyond_the_tenth_keep_their_places():
    params, config = tiny_llama(num_hidden_layers=12)
    module = merge(config, params)
    for layer in (2, 10, 11):
        weight = params[f"layers.{layer}.self_attn.q_proj.weight"]
        found = module.layers[layer].self_attn.q_proj.weight[...]
        np.testing.assert_array_equal(found, weight)


def test_merge_checks_the_parameters():
    params, config = tiny_llama()
    del params["norm.weight"]
    with pytest.raises(ValueError, match=r"missing norm\.weight"):
        merge(config, params)


def test_check_params_lists_everything_that_does_not_fit():
    params, config = tiny_llama()
    check_params(config, params)
    del params["norm.weight"], params["layers.1.mlp.up_proj.weight"]
    params["layers.2.mlp.up_proj.weight"] = jnp.zeros((64, 32))
    params["lm_head.bias"] = jnp.zeros((128,))
    transposed = params["layers.0.self_attn.k_proj.weight"].T
    params["layers.0.self_attn.k_proj.weight"] = transposed
    params["embed_tokens.weight"] = params["embed_tokens.weight"][:127]
    with pytest.raises(ValueError, match="do not fit the model config") as caught:
        check_params(config, params)
    assert str(caught.value).split(": ", 1)[1].split("; ") == [
        "missing layers.1.mlp.up_proj.weight",
        "missing norm.weight",
        "unknown layers.2.mlp.up_proj.weight",
        "unknown lm_head.bias",
        "embed_tokens.weight has shape (127, 32), expected (128, 32)",
        "layers.0.self_attn.k_proj.weight has shape (32, 16), expected (16, 32)",
    ]


def test_init_params_are_those_of_the_seed_in_the_configs_dtype():
    _, config = tiny_llama(dtype="bfloat16", mlp_bias=True)
    first, again, other = (init_params(config, seed) for seed in (3, 3, 4))
    check_params(config, first)
    for name, value in first.items():
        assert value.dtype == jnp.bfloat16
        np.testing.assert_array_equal(value, again[name])
        assert (value != other[name]).any()


# Rotary embedding


def rope_config(head_dim=64, rope_theta=5e5, **scaling):
    return ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=131072,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rope_scaling=RopeScaling(**scaling) if scaling else None,
    )


def llama3_reference(config):
    """Llama 3.1's rule in float64, a frequency at a time; and each one's band."""
    scaling = config.rope_scaling
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    frequencies, bands = [], []
    for pair in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            band = "kept"
        elif wavelength > original / low:
            band, frequency = "divided", frequency / scaling.factor
        else:
            band = "blended"
            smooth = (original / wavelength - low) / (high - low)
            frequency *= (1 - smooth) / scaling.factor + smooth
        bands.append(band)
        frequencies.append(frequency)
    return frequencies, bands


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0},
        {"factor": 32.0},
        {"factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 64.0},
        {"factor": 8.0, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_llama3_scaling_keeps_blends_and_divides(scaling):
    config = rope_config(rope_type="llama3", **scaling)
    expected, bands = llama3_reference(config)
    assert set(bands) == {"kept", "blended", "divided"}
    frequencies = rope_frequencies(config)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_plain_frequencies_are_powers_of_theta():
    expected = [10000.0 ** (-2 * pair / 16) for pair in range(8)]
    frequencies = rope_frequencies(rope_config(head_dim=16, rope_theta=1e4))
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaled = rope_frequencies(rope_config(rope_type="linear", factor=2.5))
    np.testing.assert_allclose(scaled, rope_frequencies(rope_config()) / 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["llama32_llama3_rope_far", "llama31_llama3_rope", "llama_linear_rope"]
)
def test_frequencies_equal_those_of_transformers(name):
    source = json.loads((FIXTURES / name / "config.json").read_text())
    scaling = dict(source["rope_scaling"])
    scaling["rope_type"] = scaling.pop("rope_type", None) or scaling.pop("type")
    heads = source["num_attention_heads"]
    config = rope_config(
        head_dim=source.get("head_dim") or source["hidden_size"] // heads,
        rope_theta=source["rope_theta"],
        **scaling,
    )
    expected = np.load(FIXTURES / name / "expected.npz")["inv_freq"]
    assert expected.shape == (config.head_dim // 2,)
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-6)


def cos_and_sin(positions, half):
    angles = np.outer(positions, 10000.0 ** (-np.arange(half) / half))
    return (
        angles,
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def test_apply_rope_multiplies_complex_numbers():
    x = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32)
    angles, cos, sin = cos_and_sin([0, 1, 2, 9, 4000], 8)
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], -1)
    result = np.asarray(jax.jit(apply_rope)(jnp.asarray(x), cos, sin))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(result[0], x[0])


def test_apply_rope_keeps_the_dtype_and_rounds_once():
    x = np.random.default_rng(1).standard_normal((5, 3, 16))
    x = jnp.asarray(x, jnp.bfloat16)
    _, cos, sin = cos_and_sin([1, 5, 7, 100, 4000], 8)
    result = jax.jit(apply_rope)(x, cos, sin)
    assert result.dtype == jnp.bfloat16
    exact = jax.jit(apply_rope)(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(result, exact.astype(jnp.bfloat16))


# The forward pass, without a cache


def dense_attend(layer, q, k, v):
    del layer
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*wide, is_causal=True).astype(q.dtype)


def logits_of(params, config, tokens, positions=None):
    positions = np.arange(len(tokens)) if positions is None else positions

    @jax.jit
    def run(params, tokens, positions):
        model = merge(config, params)
        return model.logits(model(tokens, positions, dense_attend))

    return run(params, jnp.asarray(tokens, "int32"), jnp.asarray(positions, "int32"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_equal_a_dense_decoder_in_float64(tied):
    params, config = tiny_llama(seed=1, tie_word_embeddings=tied, head_dim=12)
    tokens = np.random.default_rng(0).integers(128, size=19)
    weights = {name: np.asarray(x, np.float64) for name, x in params.items()}
    expected = dense_logits(weights, config, tokens)
    result = logits_of(params, config, tokens)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)


def test_attention_sees_differences_of_positions_only():
    params, config = tiny_llama(seed=2)
    tokens = np.random.default_rng(1).integers(128, size=12)
    logits = logits_of(params, config, tokens)
    shifted = logits_of(params, config, tokens, np.arange(12) + 300)
    np.testing.assert_allclose(shifted, logits, rtol=0, atol=1e-4)
    stretched = logits_of(params, config, tokens, 2 * np.arange(12))
    assert np.abs(stretched - logits).max() > 0.01


def test_attend_is_called_once_a_layer_in_order_with_grouped_heads():
    params, config = tiny_llama(num_hidden_layers=3)
    calls = []

    def attend(layer, q, k, v):
        calls.append((layer, q.shape, k.shape, v.shape))
        return jnp.zeros_like(q)

    tokens = jnp.zeros((5,), jnp.int32)
    hidden = merge(config, params)(tokens, tokens, attend)
    assert hidden.shape == (5, 32)
    assert calls == [(i, (5, 4, 8), (5, 2, 8), (5, 2, 8)) for i in range(3)]


def test_logits_are_float32_for_a_bfloat16_model():
    params, config = tiny_llama(dtype="bfloat16")
    assert logits_of(params, config, [1, 2, 3]).dtype == jnp.float32
