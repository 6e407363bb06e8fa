import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cpu_kernels
from jaxkv.device import dense
from tests.cpu_kernels.kernel_cases import random_integers

DTYPES = ["float32", "bfloat16"]
# On both sides of every tile: 3 or 4 tokens, 4 or 6 outputs, 8, 16 or 32 elements;
# and of every block: 32 tokens, 96 KiB of weights.
TOKENS = (*range(1, 10), 31, 32, 33, 65)
OUT_DIMS = (1, 5, 6, 7, 13, 97)
IN_DIMS = (1, 15, 16, 17, 31, 33, 576, 1537)


def random_floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def multiply(x, *weights, **options):
    call = functools.partial(cpu_kernels.multiply, **options)
    return tuple(np.asarray(y) for y in jax.jit(call)(x, *weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_of_integers_are_exact(instruction_set, tokens, dtype):
    xs = [random_integers(d, tokens, d) for d in IN_DIMS]
    weights = [[random_integers(n, n, d) for n in OUT_DIMS] for d in IN_DIMS]
    result_dtypes = [DTYPES[(tokens + i) % 2] for i in range(len(IN_DIMS))]

    @jax.jit
    def multiply_all(xs, weights):
        return [
            cpu_kernels.multiply(
                x, *ws, result_dtype=result_dtype, instruction_set=instruction_set
            )
            for x, ws, result_dtype in zip(xs, weights, result_dtypes, strict=True)
        ]

    in_dtype = functools.partial(jax.tree.map, lambda a: a.astype(dtype))
    results = multiply_all(in_dtype(xs), in_dtype(weights))
    for x, ws, ys, dtype in zip(xs, weights, results, result_dtypes, strict=True):
        assert [y.shape for y in ys] == [(tokens, n) for n in OUT_DIMS]
        y = np.concatenate(ys, axis=1)
        assert y.dtype == dtype
        expected = x @ np.concatenate(ws).T  # exact as well
        assert (y == expected.astype(dtype)).all()


@pytest.mark.parametrize("result_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "in_dim"), [(9, 33), (33, 576), (2, 1537), (25, 4097), (5, 20_001)]
)
def test_sums_are_float32(instruction_set, tokens, in_dim, dtype, result_dtype):
    x = np.asarray(jnp.asarray(random_floats(0, tokens, in_dim), dtype))
    ws = [jnp.asarray(random_floats(n, n, in_dim), dtype) for n in (13, 7)]
    ys = multiply(x, *ws, result_dtype=result_dtype, instruction_set=instruction_set)
    for w, y in zip(ws, ys, strict=True):
        x64, w64 = x.astype(np.float64), np.asarray(w).astype(np.float64)
        expected, size = x64 @ w64.T, np.abs(x64) @ np.abs(w64).T
        # Partial sums of at least 8 lanes, of which each step rounds once, and then
        # the sum of up to 16 of them (Higham, 2002, section 4.2).
        bound = (np.ceil(in_dim / 8) + 4) * 2.0**-24 * size
        if result_dtype == "bfloat16":
            bound += 2.0**-8 * (np.abs(expected) + bound)
        assert (np.abs(y.astype(np.float64) - expected) <= bound).all()


def test_results_are_rounded_to_the_nearest_even(instruction_set):
    rng = np.random.default_rng(0)
    upper = rng.integers(0x0080, 0x7F80, 4096)  # normal numbers; FTZ hides the others
    upper = np.concatenate([upper, upper | 0x8000, [0x7F7F, 0xFF7F]])
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] << 16 | lower).astype(np.uint32)
    # Infinities, and NaN of which the last two would be rounded up to zeros.
    special = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF]
    bits = np.concatenate([bits.ravel(), np.array(special, np.uint32)])
    x = bits.view(np.float32)[:, None]
    w = np.ones((1, 1), np.float32)
    for left, right in ((x, w), (w, x)):
        (y,) = multiply(
            left, right, result_dtype="bfloat16", instruction_set=instruction_set
        )
        np.testing.assert_array_equal(
            y.reshape(-1, 1).astype(np.float32),
            x.astype(jnp.bfloat16).astype(np.float32),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_product(instruction_set, dtype):
    x, w = jnp.zeros((3, 17), dtype), jnp.zeros((7, 17), dtype)
    empty, full = multiply(x, w[:0], w, instruction_set=instruction_set)
    assert (empty.shape, full.shape) == ((3, 0), (3, 7))
    (y,) = multiply(x[:0], w, instruction_set=instruction_set)
    assert y.shape == (0, 7)
    (y,) = multiply(x[:, :0], w[:, :0], instruction_set=instruction_set)
    np.testing.assert_array_equal(y, np.zeros((3, 7), y.dtype))
    assert multiply(x, instruction_set=instruction_set) == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_dim", [17, 1537])
def test_a_token_gets_the_same_bits_among_any_others(instruction_set, in_dim, dtype):
    kernel = functools.partial(
        cpu_kernels.multiply, result_dtype="float32", instruction_set=instruction_set
    )
    call = jax.jit(kernel)
    x = jnp.asarray(random_floats(0, 40, in_dim), dtype)
    ws = [jnp.asarray(random_floats(n, n, in_dim), dtype) for n in (7, 38)]
    one_by_one = jax.jit(lambda x: jax.lax.map(lambda x: kernel(x[None], *ws), x))
    alone = [np.asarray(y)[:, 0] for y in one_by_one(x)]
    for first, tokens in ((3, 2), (1, 3), (2, 5), (0, 40)):
        among = call(x[first : first + tokens], *ws)
        for y, expected in zip(among, alone, strict=True):
            np.testing.assert_array_equal(y, expected[first : first + tokens])
    # Nor do the other outputs matter, and where in the weight an output stands.
    (among,) = call(x, ws[1][5:24])
    np.testing.assert_array_equal(among, alone[1][:, 5:24])
    (among,) = call(x[9:11], ws[1][11:12])
    np.testing.assert_array_equal(among, alone[1][9:11, 11:12])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 6, 37])
def test_tokens_of_zeros_give_zeros_wherever_they_are(instruction_set, tokens, dtype):
    """Those behind all others are not computed, whatever the weight holds."""
    x, w = random_integers(0, tokens, 19), random_integers(1, 13, 19)
    x[:, 0] = 1
    bad = w.copy()
    bad[5] = np.nan
    for kept in {0, tokens // 2, tokens}:
        zeros = x.copy()
        zeros[kept:] = 0
        zeros[kept // 2] = 0
        zeros[1:2] = 0
        y, y_bad = multiply(
            *(jnp.asarray(a, dtype) for a in (zeros, w, bad)),
            result_dtype="float32",
            instruction_set=instruction_set,
        )
        np.testing.assert_array_equal(y, zeros @ w.T)
        last = max(np.flatnonzero(zeros.any(axis=1)), default=-1)
        np.testing.assert_array_equal(y_bad[last + 1 :], 0)
        np.testing.assert_array_equal(y_bad[: last + 1, 5], np.nan)
        good = np.delete(np.arange(13), 5)
        np.testing.assert_array_equal(y_bad[:, good], y[:, good])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_with_their_token_and_output(
    instruction_set, value, dtype
):
    x, w = np.ones((9, 35), np.float32), np.ones((15, 35), np.float32)
    for place in (0, 20, 34):
        bad_x, bad_w, expected = x.copy(), w.copy(), np.full((9, 15), 35, np.float32)
        bad_x[4, place], bad_w[7, place] = value, value
        expected[4], expected[:, 7] = value, value
        expected[4, 7] = abs(value)
        (y,) = multiply(
            jnp.asarray(bad_x, dtype),
            jnp.asarray(bad_w, dtype),
            instruction_set=instruction_set,
        )
        np.testing.assert_array_equal(y.astype(np.float32), expected)


def test_other_dtypes_are_refused():
    x, w = jnp.zeros((2, 4)), jnp.zeros((3, 4))
    with pytest.raises(NotImplementedError, match="arrays of float16"):
        cpu_kernels.multiply(x.astype("float16"), w.astype("float16"))
    with pytest.raises(NotImplementedError, match="arrays of float16"):
        cpu_kernels.multiply(x, w, result_dtype="float16")
    with pytest.raises(NotImplementedError, match="arrays of different dtypes"):
        cpu_kernels.multiply(x, w.astype("bfloat16"))


def test_float16_products_are_those_of_xla(caplog):
    dense._log_once.cache_clear()
    x, w = (jnp.asarray(random_integers(i, i, 5), "float16") for i in (2, 3))
    for _ in range(2):
        (y,) = dense.multiply(x, w)
        assert y.dtype == "float16"
        np.testing.assert_array_equal(y, np.asarray(x) @ np.asarray(w).T)
    assert [record.getMessage() for record in caplog.records] == [
        "cpu_kernels cannot do this, but XLA can: arrays of float16"
    ]


def dot_general(x, *weights):
    return tuple(lax.dot_general(x, w, (((1,), (1,)), ((), ()))) for w in weights)


def integers():
    """One x and two weights."""
    x, *ws = (random_integers(n, n, 19) for n in (5, 7, 3))
    return jax.tree.map(jnp.asarray, (x, tuple(ws)))


def scalar(multiply):
    """A function of x and weights whose gradients depend on every product."""

    def function(x, ws):
        a, b = multiply(x, *ws)
        return (a * a).sum() + (a[:, :3] * b).sum()

    return function


@pytest.mark.parametrize("derivative", ["gradient", "tangent", "second"])
def test_derivatives_are_those_of_dot_general(derivative):
    x, ws = integers()
    tangents = jax.tree.map(lambda a: a[::-1], (x, ws))

    def of(multiply):
        function = scalar(multiply)
        if derivative == "gradient":
            return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(x, ws)
        if derivative == "tangent":
            return jax.jit(lambda x, ws: jax.jvp(function, (x, ws), tangents))(x, ws)
        return jax.jit(jax.hessian(function))(x, ws)

    results, expected = of(cpu_kernels.multiply), of(dot_general)
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_vmap_is_that_of_dot_general(axes):
    x, ws = integers()
    if axes[0] == 0:
        x = jnp.stack([x, x[::-1], 2 * x])
    if axes[1] == 0:
        ws = tuple(jnp.stack([w, -w, w[::-1]]) for w in ws)

    def products_of(multiply):
        return jax.jit(jax.vmap(lambda x, ws: multiply(x, *ws), in_axes=axes))

    def gradients_of(multiply):
        gradient = jax.grad(scalar(multiply), argnums=(0, 1))
        return jax.jit(jax.vmap(gradient, in_axes=axes))

    for of in (products_of, gradients_of):
        jax.tree.map(
            np.testing.assert_array_equal,
            of(cpu_kernels.multiply)(x, ws),
            of(dot_general)(x, ws),
        )


def test_gradients_of_bfloat16_products_are_bfloat16():
    x, (w, _) = jax.tree.map(lambda a: a.astype("bfloat16"), integers())

    def total(x):
        return cpu_kernels.multiply(x, w, result_dtype="float32")[0].sum()

    gradient = jax.grad(total)(x)
    assert gradient.dtype == "bfloat16"
    expected = np.broadcast_to(np.asarray(w, np.float32).sum(0), x.shape)
    np.testing.assert_array_equal(gradient.astype("float32"), expected)


def test_denormals_are_the_same_on_every_thread(instruction_set):
    """XLA's threads take them for zeros, and so must those that help."""
    x = jnp.full((5, 40), 1e-20)
    for dtype in DTYPES:
        for w in (jnp.full((9000, 40), 1e-20), jnp.full((9000, 40), 1e-39)):
            (y,) = multiply(
                x.astype(dtype),
                w.astype(dtype),
                result_dtype="float32",
                instruction_set=instruction_set,
            )
            assert len(np.unique(y.view("uint32"))) == 1


def test_many_products_at_once_neither_wait_for_ever_nor_mix():
    """XLA runs what does not depend on each other at the same time, on one pool."""
    count = 40
    xs = jnp.asarray(random_integers(0, count, 3, 600))
    ws = jnp.asarray(random_integers(1, count, 200, 600))
    expected = np.einsum("ctd,cod->cto", xs, ws)

    @jax.jit
    def multiply_all(xs, ws):
        return [cpu_kernels.multiply(x, w)[0] for x, w in zip(xs, ws, strict=True)]

    multiply_all(xs, ws)
    failures = []

    def work():
        for _ in range(5):
            if not np.array_equal(np.stack(multiply_all(xs, ws)), expected):
                failures.append(1)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
