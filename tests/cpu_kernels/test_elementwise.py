import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpu_kernels
from jaxkv.device import dense

DTYPES = ["float32", "bfloat16"]
DIMS = (1, 7, 8, 15, 16, 17, 33, 576, 1537)


def random_floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rms_norm(x, weight, eps=1e-5, **options):
    call = functools.partial(cpu_kernels.rms_norm, eps=eps, **options)
    return np.asarray(jax.jit(call)(x, weight))


def vectors(count, dim, dtype):
    """Vectors of many sizes, and a weight."""
    x = random_floats(dim, count, dim) * 4.0 ** np.arange(-3, count - 3)[:, None]
    return jnp.asarray(x, dtype), jnp.asarray(random_floats(1, dim), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_norms_equal_float64(instruction_set, dim, dtype):
    x, weight = vectors(7, dim, dtype)
    eps = 0.5 if dim % 2 else 1e-5
    y = rms_norm(x, weight, eps, instruction_set=instruction_set)
    assert y.dtype == dtype
    x, weight = (np.asarray(a).astype(np.float64) for a in (x, weight))
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    # A sum of positive numbers is as exact as its steps; its root halves the error.
    bound = (np.ceil(dim / 8) / 2 + 8) * 2.0**-24
    if dtype == "bfloat16":
        bound += 2 * 2.0**-8 + 2.0**-15  # rounded twice
    error = np.abs(y.astype(np.float64) - normed * weight)
    assert (error <= bound * np.abs(normed * weight)).all()


def test_norms_are_rounded_before_the_weight(instruction_set):
    x, weight = vectors(7, 576, "bfloat16")
    y = rms_norm(x, weight, instruction_set=instruction_set)
    ones = jnp.ones_like(weight)
    normed = rms_norm(x, ones, instruction_set=instruction_set)
    product = normed.astype(np.float32) * np.asarray(weight).astype(np.float32)
    np.testing.assert_array_equal(y, product.astype(y.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [17, 576])
def test_a_vector_gets_the_same_bits_among_any_others(instruction_set, dim, dtype):
    options = {"instruction_set": instruction_set}
    x, weight = jnp.asarray(random_floats(0, 50, dim), dtype), jnp.ones(dim, dtype)
    together = rms_norm(x, weight, **options)
    for first, count in ((0, 1), (49, 1), (15, 18)):
        some = rms_norm(x[first : first + count], weight, **options)
        np.testing.assert_array_equal(some, together[first : first + count])
    heads = rms_norm(x.reshape(5, 10, dim), weight, **options)
    np.testing.assert_array_equal(heads.reshape(50, dim), together)


def test_nan_stays_with_its_vector_and_zeros_stay_zeros(instruction_set):
    x = random_floats(0, 20, 33)
    weight = jnp.ones(33)
    clean = np.array(rms_norm(x, weight, instruction_set=instruction_set))
    x[4, 32], x[9] = np.nan, 0
    y = rms_norm(x, weight, instruction_set=instruction_set)
    clean[4], clean[9] = np.nan, 0
    np.testing.assert_array_equal(y, clean)


def test_no_vectors(instruction_set):
    y = rms_norm(jnp.zeros((0, 17)), jnp.ones(17), instruction_set=instruction_set)
    assert y.shape == (0, 17)


@pytest.mark.parametrize("shape", [(6, 19), (2, 3, 19)])
def test_derivatives_and_vmap_of_norms_are_those_of_the_reference(shape):
    x, weight = jnp.asarray(random_floats(0, *shape)), jnp.asarray(random_floats(1, 19))

    def of(norm):
        norm = functools.partial(norm, eps=1e-5)
        mapped = jax.jit(jax.vmap(norm, in_axes=(0, None)))(x, weight)
        gradients = jax.jit(
            jax.grad(lambda x, w: jnp.sin(norm(x, w)).sum(), argnums=(0, 1))
        )(x, weight)
        return mapped, gradients

    for result, expected in zip(
        jax.tree.leaves(of(cpu_kernels.rms_norm)),
        jax.tree.leaves(of(cpu_kernels.rms_norm_reference)),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_norms_of_other_dtypes_are_those_of_the_reference(caplog):
    dense._log_once.cache_clear()
    x, weight = jnp.ones((3, 8), "float16"), jnp.ones(8, "float16")
    with pytest.raises(NotImplementedError, match="arrays of float16"):
        cpu_kernels.rms_norm(x, weight, eps=0.0)
    with pytest.raises(NotImplementedError, match="arrays of float16"):
        cpu_kernels.rms_norm(x.astype("float32"), weight, eps=0.0)
    for _ in range(2):
        np.testing.assert_array_equal(dense.rms_norm(x, weight, eps=0.0), x)
    assert [record.getMessage() for record in caplog.records] == [
        "cpu_kernels cannot do this, but XLA can: arrays of float16"
    ]


def swiglu(gate, up, **options):
    call = functools.partial(cpu_kernels.swiglu, **options)
    return np.asarray(jax.jit(call)(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 16), (1, 17), (7, 2341)])
def test_gates_equal_float64(instruction_set, shape, dtype):
    gate, up = (
        jnp.asarray(random_floats(i, *shape) * size, dtype)
        for i, size in enumerate((10, 2))
    )
    y = swiglu(gate, up, instruction_set=instruction_set)
    assert y.dtype == dtype
    gate, up = (np.asarray(a).astype(np.float64) for a in (gate, up))
    expected = gate / (1 + np.exp(-gate)) * up
    bound = 8 * 2.0**-24 + (2.0**-8 if dtype == "bfloat16" else 0)
    assert (np.abs(y.astype(np.float64) - expected) <= bound * np.abs(expected)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_any_size(instruction_set, dtype):
    size = [0, 50, 87, 89, 200, 1e10, 1e38, 3e38]
    gate = jnp.asarray([size, np.negative(size)], dtype)
    y = swiglu(gate, jnp.ones_like(gate), instruction_set=instruction_set)
    gate = np.asarray(gate).astype(np.float64)
    # The results of all that are below -80 are hardly different from 0.
    np.testing.assert_allclose(y[0].astype(np.float64), gate[0], rtol=1e-6)
    np.testing.assert_allclose(
        y[1].astype(np.float64), gate[1] * np.exp(gate[1]), rtol=2.0**-7, atol=1e-35
    )
    bad = jnp.asarray([[1, np.nan, 1, 1, 1]], dtype)
    y = swiglu(bad, bad, instruction_set=instruction_set).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(y), [[False, True, False, False, False]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_gets_the_same_bits_among_any_others(instruction_set, dtype):
    gate, up = (jnp.asarray(random_floats(i, 30, 577), dtype) for i in range(2))
    together = swiglu(gate, up, instruction_set=instruction_set)
    for part in (slice(1), slice(29, 30), slice(3, 17)):
        some = swiglu(gate[part], up[part], instruction_set=instruction_set)
        np.testing.assert_array_equal(some, together[part])


def test_derivatives_and_vmap_of_gates_are_those_of_the_reference():
    gate, up = (jnp.asarray(random_floats(i, 3, 19)) for i in range(2))

    def of(function):
        mapped = jax.jit(jax.vmap(function, in_axes=(0, None)))(gate, up[0])
        gradients = jax.jit(
            jax.grad(lambda *a: jnp.sin(function(*a)).sum(), argnums=(0, 1))
        )(gate, up)
        return mapped, gradients

    for result, expected in zip(
        jax.tree.leaves(of(cpu_kernels.swiglu)),
        jax.tree.leaves(of(cpu_kernels.swiglu_reference)),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_gates_of_other_dtypes_are_those_of_the_reference(caplog):
    dense._log_once.cache_clear()
    gate = jnp.ones((3, 8), "float16")
    with pytest.raises(NotImplementedError, match="arrays of float16"):
        cpu_kernels.swiglu(gate, gate)
    with pytest.raises(NotImplementedError, match="arrays of different dtypes"):
        cpu_kernels.swiglu(gate.astype("float32"), gate.astype("bfloat16"))
    for _ in range(2):
        np.testing.assert_array_equal(
            dense.swiglu(gate, gate), cpu_kernels.swiglu_reference(gate, gate)
        )
    assert [record.getMessage() for record in caplog.records] == [
        "cpu_kernels cannot do this, but XLA can: arrays of float16"
    ]
