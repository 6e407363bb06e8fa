"""The largest numbers of a row: the same as JAX's own, ties and all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkv.device.top_k import _TILE, largest


def check(x, k):
    x = jnp.asarray(x, jnp.float32)
    expected_values, expected_places = lax.top_k(x, k)
    values, places = jax.jit(largest, static_argnums=1)(x, k)
    assert values.dtype == jnp.float32
    assert places.dtype == jnp.int32
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(places, expected_places)


WIDTHS = [1, 20, _TILE, 20 * _TILE, 21 * _TILE - 1, 21 * _TILE, 21 * _TILE + 1, 5000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", [1, 2, 20])
def test_largest_is_top_k(width, k):
    x = np.random.default_rng(width).standard_normal((3, width))
    check(x, min(k, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_equal_numbers_come_in_their_order(width):
    rng = np.random.default_rng(width)
    check(rng.integers(3, size=(4, width)), min(20, width))
    check(np.zeros((2, width)), min(20, width))


def test_infinite_numbers_have_their_places_and_padding_has_none():
    width = 30 * _TILE + 3
    x = np.full((3, width), -np.inf)
    x[1, [5, 700, width - 1]] = [1.0, np.inf, 2.0]
    x[2, width - 7 :] = 3.0
    check(x, 20)


def test_all_may_lie_in_one_tile_or_each_in_another():
    x = np.random.default_rng(0).standard_normal((2, 64 * _TILE))
    x[0, 3 * _TILE : 3 * _TILE + 20] += 10
    x[1, ::_TILE] += 10
    check(x, 20)
