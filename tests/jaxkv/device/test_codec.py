"""Formats of stored vectors: what they hold, what they lose, and bad input."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.device.codec import (
    Quantized,
    decode,
    encode,
    format_of,
    init_blocks,
    prepare_queries,
    restore_outputs,
    vector_shape,
)
from jaxkv.kv_format import KV_FORMATS, KVFormat, make_kv_format
from tests.low_bit import LOW_BIT, decoded, of_elements, stored_codes

HEAD_DIMS = [6, 80, 96, 128]
FORMATS = [
    *(make_kv_format(name, False, 0.03) for name in LOW_BIT),
    KVFormat("int4", is_rotated=True),
    KVFormat("int4_asymmetric", is_rotated=True),
]
DYNAMIC = [kv_format for kv_format in FORMATS if kv_format.scale is None]
FLOAT8_BITS = {"e4m3": (3, 2.0**-9), "e5m2": (2, 2.0**-16)}  # mantissa, least number


def stored(x, kv_format):
    return jax.jit(encode, static_argnums=1)(jnp.asarray(x), kv_format)


def random_vectors(head_dim, seed=0, count=40):
    """Vectors of very different sizes, with a few large elements."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 2, head_dim)) * 10.0 ** rng.integers(
        -6, 6, (count, 2, 1)
    )
    x[:, :, head_dim // 2] *= 20
    return x.astype(np.float32)


def half_a_step(vectors):
    """Return half the distance of neighbouring codes at each element."""
    name, values = vectors.format.name, np.abs(decoded(vectors))
    if name.startswith("int4"):
        return of_elements(np.abs(vectors.scales), values.shape[-1]) / 2
    scale = vectors.format.scale
    if scale is None:
        scale = np.asarray(vectors.scales, np.float64)[..., None]
    if name == "int8":
        return np.broadcast_to(scale / 2, values.shape)
    mantissa, least = FLOAT8_BITS[name.split("_")[1]]
    codes = np.abs(stored_codes(vectors))
    exponent = np.floor(np.log2(np.maximum(codes, 2.0**mantissa * least)))
    return 2.0 ** (exponent - mantissa) * scale / 2


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_decoding_follows_the_documented_layout(kv_format, head_dim):
    x = random_vectors(head_dim)
    vectors = stored(x, kv_format)
    assert format_of(vectors) == kv_format
    assert vector_shape(vectors) == x.shape
    got = restore_outputs(decode(vectors), kv_format)
    expected = decoded(vectors)
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(got - expected) <= 2e-6 * largest).all()


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", LOW_BIT)
def test_each_element_gets_the_nearest_code_of_its_scale(name, head_dim):
    """So scales are kept in the precision in which they were used."""
    kv_format = make_kv_format(name, False, 0.03)
    x = random_vectors(head_dim) if kv_format.scale is None else random_small(head_dim)
    vectors = stored(x, kv_format)
    codes = stored_codes(vectors)
    is_clipped = np.isin(codes, [codes.min(), codes.max()]) | (np.abs(codes) == 448)
    error = np.abs(decoded(vectors) - x)
    limit = half_a_step(vectors) * (1 + 1e-4)
    if kv_format.has_groups:  # clipping some is allowed, see below
        is_clipped = (codes == -8) | (codes == 7)
    np.testing.assert_array_less(error[~is_clipped], limit[~is_clipped] + 1e-30)
    if not kv_format.has_groups:
        np.testing.assert_array_less(error, limit + 1e-30)


def random_small(head_dim):
    """Vectors within a static scale's reach."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((40, 2, head_dim)).astype(np.float32)


@pytest.mark.parametrize("name", ["int4", "int4_asymmetric"])
def test_a_clipped_group_is_closer_to_its_vector_than_an_unclipped_one(name):
    x = np.random.default_rng(0).standard_normal((200, 1, 64)).astype(np.float32)
    grouped = x.reshape(-1, 32).astype(np.float64)
    lowest, highest = grouped.min(1, keepdims=True), grouped.max(1, keepdims=True)
    if name == "int4":
        size = np.where(highest > -lowest, highest, lowest) / -8
        center = 0.0
    else:
        size = (highest - lowest) / 15
        center = lowest + 8 * size
    codes = np.clip(np.round((grouped - center) / size), -8, 7)
    unclipped = ((codes * size + center - grouped) ** 2).sum(1)
    got = decoded(stored(x, KVFormat(name))).reshape(-1, 32)
    error = ((got - grouped) ** 2).sum(1)
    assert (error <= unclipped * 1.05).all()  # rounded scales cost a little
    assert error.sum() < 0.97 * unclipped.sum()


@pytest.mark.parametrize("name", ["int4", "int4_asymmetric"])
def test_groups_do_not_touch_each_other(name):
    x = random_small(80)
    before = decoded(stored(x, KVFormat(name)))
    for group in range(3):
        changed = x.copy()
        changed[..., 32 * group : 32 * group + 32] *= 1e4
        after = decoded(stored(changed, KVFormat(name)))
        others = np.arange(80) // 32 != group
        np.testing.assert_array_equal(after[..., others], before[..., others])


def test_two_codes_of_4_bits_in_a_byte():
    x = np.array([[[-8, 7, 1, -1, 0, 3]]], np.float32)
    vectors = stored(x, KVFormat("int4"))
    assert vectors.codes.tolist() == [[[0x78, 0xF1, 0x30]]]
    assert vectors.scales.astype(jnp.float32).tolist() == [[[1.0]]]


@pytest.mark.parametrize("scale_sign", [1, -1])
def test_the_larger_end_of_a_group_gets_the_code_that_has_no_opposite(scale_sign):
    x = scale_sign * np.array([[[-8, 7, 1, -1, 0, 3]]], np.float32)
    vectors = stored(x, KVFormat("int4"))
    assert vectors.scales.astype(jnp.float32).tolist() == [[[scale_sign]]]
    np.testing.assert_array_equal(decoded(vectors), x)


@pytest.mark.parametrize("constant", [0.0, 1.5, -3e4, 1e-7, -1e-7, 1e-30])
@pytest.mark.parametrize("kv_format", DYNAMIC, ids=str)
def test_b55_a_constant_vector_comes_back(kv_format, constant):
    x = np.full((1, 1, 64), constant, np.float32)
    vectors = stored(x, kv_format)
    assert np.isfinite(vectors.scales.astype(jnp.float32)).all()
    assert (vectors.scales.astype(jnp.float32) != 0).all()
    got = decoded(vectors)
    if constant == 0:
        np.testing.assert_array_equal(got, 0)
    elif not kv_format.is_rotated:
        np.testing.assert_array_less(
            np.abs(got - x), half_a_step(vectors) * (1 + 1e-5) + 1e-38
        )
    np.testing.assert_allclose(got, x, rtol=0.04, atol=1e-38)


def test_b55_a_tiny_range_around_a_large_constant_is_kept():
    x = (1.0 + 1e-3 * np.random.default_rng(0).random((1, 1, 32))).astype(np.float32)
    got = decoded(stored(x, KVFormat("int4_asymmetric")))
    # Sixteen steps reach from the rounded centre, 2^-8 away at most, to the ends.
    assert np.abs(got - x).max() < 2**-8 / 7


@pytest.mark.parametrize(
    ("name", "largest"), [("fp8_e4m3_static", 448.0), ("fp8_e5m2_static", 57344.0)]
)
def test_b62_float8_saturates(name, largest):
    x = [0, 447, 449, 500, 1e4, -1e5, 7e4, np.inf, -np.inf, 3e38, -3e38, np.nan]
    x = np.array([[x]], np.float32)
    got = decoded(stored(x, KVFormat(name, scale=1.0)))
    expected = np.nan_to_num(np.clip(x, -largest, largest))
    expected = expected.astype(
        ml_dtypes.float8_e4m3fn if "e4m3" in name else ml_dtypes.float8_e5m2
    )
    np.testing.assert_array_equal(got, expected.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_infinities_count_as_the_largest_float_and_nan_is_stored_as_0(kv_format, dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.zeros((4, 1, 64), np.float32)
    x[0, 0, [3, 40]] = np.inf, -np.inf
    x[1, 0, 5] = np.nan
    x[2, 0] = np.where(np.arange(64) % 2, largest, -largest)
    x[3, 0] = -largest
    x[1, 0, 6] = x[1, 0, 40] = 1.0
    vectors = stored(jnp.asarray(x, dtype), kv_format)
    got = decode(vectors)
    assert np.isfinite(got).all()
    if kv_format.scale is None:
        scales = np.asarray(vectors.scales.astype(jnp.float32))
        assert np.isfinite(scales).all()
        assert (scales != 0).all()
    if kv_format.scale is None and not kv_format.is_rotated:
        got = decoded(vectors)
        if kv_format.has_groups:
            # So that rounded scales lead to nothing infinite.
            float32 = float(jnp.finfo(jnp.float32).max)
            largest = min(largest * (1 - 2**-8), float32 * 14 / 15)
        finite = np.clip(np.nan_to_num(x, nan=0.0), -largest, largest)
        # Squared errors are infinite there, so 4 bits may clip one end by a whole step.
        steps = 2.2 if kv_format.has_groups else 1.01
        assert (np.abs(got - finite) <= steps * half_a_step(vectors)).all()
        assert np.abs(got[1, 0, 5]) <= half_a_step(vectors)[1, 0, 5]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_vectors_of_zeros_and_of_an_empty_cache(name):
    kv_format = make_kv_format(name, False, 0.5)
    empty = init_blocks(kv_format, (3, 2, 4, 80))
    assert vector_shape(empty) == (3, 2, 4, 80)
    np.testing.assert_array_equal(decode(empty), np.zeros((3, 2, 4, 80)))
    zeros = encode(jnp.zeros((3, 2, 4, 80), jnp.float32), kv_format)
    np.testing.assert_array_equal(decode(zeros), np.zeros((3, 2, 4, 80)))
    for stored_vectors in (empty, zeros):
        if isinstance(stored_vectors, Quantized) and stored_vectors.scales is not None:
            assert (stored_vectors.scales.astype(jnp.float32) != 0).all()
    assert jax.tree.structure(empty) == jax.tree.structure(zeros)
    for x, y in zip(jax.tree.leaves(empty), jax.tree.leaves(zeros), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_changes_no_score(head_dim):
    kv_format = KVFormat("int4", is_rotated=True)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 7, 3, head_dim)).astype(np.float32)
    rotated_q = prepare_queries(jnp.asarray(q), kv_format)
    # Rotating is its own inverse, and so is what restores outputs.
    rotated_k = restore_outputs(jnp.asarray(k), kv_format)
    got = np.einsum("thd,shd->ths", rotated_q, rotated_k)
    np.testing.assert_allclose(got, np.einsum("thd,shd->ths", q, k), atol=2e-5)
    np.testing.assert_allclose(restore_outputs(rotated_k, kv_format), k, atol=2e-6)
    if head_dim > 6:
        assert np.abs(rotated_q - q).max() > 1


def test_rotation_helps_where_one_element_is_large():
    x = random_small(64)
    x[..., 11] += 30
    errors = [
        np.abs(decoded(stored(x, KVFormat("int4", is_rotated=rotated))) - x).mean()
        for rotated in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_plain_formats_saturate_and_keep_nan(dtype):
    x = np.array([[[3.4e38, -np.inf, 1.5, np.nan]]], np.float32)
    got = np.asarray(encode(jnp.asarray(x), KVFormat(dtype)).astype(jnp.float32))
    largest = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(got, [[[largest, -largest, 1.5, np.nan]]])


@pytest.mark.parametrize("kv_format", DYNAMIC, ids=str)
def test_decoded_vectors_fit_the_dtype_that_was_stored(kv_format):
    largest = float(jnp.finfo(jnp.float16).max)
    x = np.zeros((2, 1, 64), np.float16)
    x[0, 0, 3], x[1, 0, 40] = largest, -np.inf
    got = restore_outputs(decode(stored(x, kv_format)), kv_format)
    assert np.isfinite(np.asarray(got).astype(np.float16)).all()


def test_a_plain_format_of_the_inputs_dtype_changes_nothing():
    x = jnp.asarray([[[np.inf, np.nan, -0.0, 1e-45]]], jnp.float32)
    np.testing.assert_array_equal(encode(x, KVFormat("float32")), x)
