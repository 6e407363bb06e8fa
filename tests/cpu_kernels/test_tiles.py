"""Products in tiles, on tiles in plain C++, and on those of the CPU if it has some."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import cpu_kernels
from cpu_kernels import entry
from tests.cpu_kernels.kernel_cases import ROOT, build_constant, random_integers

NAME = "emulated_tiles"

pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in cpu_kernels.supported_instruction_sets()
    or shutil.which("g++") is None,
    reason="needs AVX-512 with bfloat16 beside the tiles, and a compiler",
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Compile the kernels with tiles in plain C++, and register them with XLA."""
    flags = build_constant("FLAGS")["avx512_bf16"]
    common = build_constant("COMMON_FLAGS").replace("-O3", "-O1")
    library = tmp_path_factory.mktemp("kernels") / f"{NAME}.so"
    header = ROOT / "tests" / "cpu_kernels" / "emulated_tiles.h"
    command = ["g++", *common.split(), *flags.split(), f'-DJAXKV_TILES="{header}"']
    command += ["-isystem", str(Path(jaxlib.__file__).parent / "include")]
    command += [str(ROOT / "cpu_kernels" / "src" / "library.cc"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=600)
    capsule = jax.ffi.pycapsule(ctypes.CDLL(str(library)).jaxkv_multiply)
    jax.ffi.register_ffi_target(f"jaxkv_multiply_{NAME}", capsule, platform="cpu")
    return library


@pytest.fixture(params=[NAME, "amx"])
def multiply(request, monkeypatch):
    """`cpu_kernels.multiply` in tiles."""
    if request.param == NAME:
        request.getfixturevalue("emulated")
        entry.load("avx512_bf16")  # which a test compares with
        monkeypatch.setattr(entry, "load", lambda instruction_set: instruction_set)
    elif request.param not in cpu_kernels.supported_instruction_sets():
        pytest.skip("a machine without AMX")
    return functools.partial(multiply_by, request.param)


def multiply_by(instruction_set, x, *weights, result_dtype="float32"):
    x, *weights = (jnp.asarray(array, "bfloat16") for array in (x, *weights))
    ys = cpu_kernels.multiply(
        x, *weights, result_dtype=result_dtype, instruction_set=instruction_set
    )
    return [np.asarray(y) for y in ys]


def bfloat16_floats(seed, *shape):
    floats = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(jnp.asarray(floats, "bfloat16")).astype(np.float32)


# One and two tiles of tokens and of outputs, parts of such, and several chunks.
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 65, 100])
@pytest.mark.parametrize("in_dim", [32, 64, 576, 1536])
def test_products_of_integers_are_exact(multiply, tokens, in_dim):
    x = random_integers(0, tokens, in_dim)
    weights = [random_integers(n, n, in_dim) for n in (16, 32, 48, 208)]
    result_dtype = ("float32", "bfloat16")[tokens % 2]
    ys = multiply(x, *weights, result_dtype=result_dtype)
    for w, y in zip(weights, ys, strict=True):
        assert y.dtype == result_dtype
        assert (y == (x @ w.T).astype(y.dtype)).all()


def test_sums_are_those_of_tiles(emulated, monkeypatch):
    """Even and odd elements apart in 32 at a time: what vectors do not do."""
    monkeypatch.setattr(entry, "load", lambda instruction_set: instruction_set)
    x, w = bfloat16_floats(0, 20, 96), bfloat16_floats(1, 48, 96)
    (y,) = multiply_by(NAME, x, w)
    expected = np.zeros((20, 48), np.float32)
    for first in range(0, 96, 32):
        apart = [np.zeros((20, 48)), np.zeros((20, 48))]
        for i in range(first, first + 32):
            # A product of two bfloat16 is exact; fused, their sum is rounded once.
            exact = x[:, i, None].astype(np.float64) * w[None, :, i]
            apart[i % 2] = (apart[i % 2] + exact).astype(np.float32).astype(np.float64)
        expected += apart[0].astype(np.float32) + apart[1].astype(np.float32)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 32, 40])
def test_a_token_gets_the_same_bits_in_any_batch(multiply, tokens):
    x, w = bfloat16_floats(2, 70, 576), bfloat16_floats(3, 112, 576)
    (together,) = multiply(x, w)
    for first in (0, 70 - tokens, 11):
        (alone,) = multiply(x[first : first + tokens], w)
        np.testing.assert_array_equal(alone, together[first : first + tokens])


@pytest.mark.parametrize(("in_dim", "out_dims"), [(48, (16,)), (64, (32, 24))])
def test_what_is_not_whole_tiles_is_multiplied_by_vectors(multiply, in_dim, out_dims):
    x = bfloat16_floats(4, 9, in_dim)
    weights = [bfloat16_floats(n, n, in_dim) for n in out_dims]
    ys = multiply(x, *weights)
    by_vectors = multiply_by("avx512_bf16", x, *weights)
    for y, expected in zip(ys, by_vectors, strict=True):
        np.testing.assert_array_equal(y, expected)


def test_padding_gives_zeros_whatever_the_weights_hold(multiply):
    x = np.zeros((40, 64), np.float32)
    x[:18] = random_integers(5, 18, 64)
    w = random_integers(6, 32, 64)
    (y,) = multiply(x, w)
    np.testing.assert_array_equal(y, x @ w.T)
    (y,) = multiply(np.zeros((40, 64)), np.full((32, 64), np.nan))
    np.testing.assert_array_equal(y, np.zeros((40, 32)))


def test_nan_stays_with_its_token_and_its_output(multiply):
    x, w = random_integers(7, 37, 64), random_integers(8, 48, 64)
    expected = x @ w.T
    x[20, 5] = w[33, 2] = np.nan
    (y,) = multiply(x, w)
    is_nan = np.zeros(y.shape, bool)
    is_nan[20] = is_nan[:, 33] = True
    assert np.isnan(y[is_nan]).all()
    np.testing.assert_array_equal(y[~is_nan], expected[~is_nan])
