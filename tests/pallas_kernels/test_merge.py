"""Merging attention over disjoint sets of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import merge_partials
from tests.helpers import TOLERANCE

HEAD_DIM = 8


def attend(q, k, v):
    """Dense attention in float64: outputs and log-sum-exps; 0 and -inf without keys."""
    if len(k) == 0:
        return np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    scores = q @ k.T
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / total, (top + np.log(total))[..., 0]


def random_qkv(keys, queries=(3, 2), seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*queries, HEAD_DIM))
    k, v = rng.standard_normal((2, keys, HEAD_DIM))
    return q, k, v


def merge(parts):
    outs, lses = zip(*parts, strict=True)
    result = jax.jit(merge_partials)(
        jnp.asarray(np.stack(outs), jnp.float32),
        jnp.asarray(np.stack(lses), jnp.float32),
    )
    return [np.asarray(x) for x in result]


def assert_same(result, expected):
    tolerance = TOLERANCE["float32"]
    np.testing.assert_allclose(result[0], expected[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(result[1], expected[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "ends",
    [(10,), (5, 10), (1, 10), (9, 10), (1, 2, 3, 10), tuple(range(1, 11))],
    ids=str,
)
def test_attention_over_parts_equals_attention_over_all_keys(ends):
    q, k, v = random_qkv(10)
    starts = (0, *ends[:-1])
    parts = [attend(q, k[a:b], v[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert_same(merge(parts), attend(q, k, v))


@pytest.mark.parametrize("splits", [(0, 10), (10, 10), (0, 0, 4, 4, 10, 10)], ids=str)
def test_empty_parts_contribute_nothing(splits):
    q, k, v = random_qkv(10)
    parts = [
        attend(q, k[a:b], v[a:b])
        for a, b in zip((0, *splits), (*splits, 10), strict=True)
    ]
    assert_same(merge(parts), attend(q, k, v))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_that_are_all_empty_give_zero_and_minus_infinity(parts):
    empty = np.zeros((3, 2, HEAD_DIM)), np.full((3, 2), -np.inf)
    out, lse = merge([empty] * parts)
    np.testing.assert_array_equal(out, np.zeros((3, 2, HEAD_DIM)))
    np.testing.assert_array_equal(lse, np.full((3, 2), -np.inf))


def test_rows_beside_a_row_without_keys_are_unaffected():
    q, k, v = random_qkv(10, queries=(3,))
    parts = [attend(q, k[:6], v[:6]), attend(q, k[6:], v[6:])]
    alone = merge(parts)
    for out, lse in parts:
        out[1], lse[1] = 0.0, -np.inf
    out, lse = merge(parts)
    np.testing.assert_array_equal(out[1], np.zeros(HEAD_DIM))
    assert lse[1] == -np.inf
    np.testing.assert_array_equal(out[[0, 2]], alone[0][[0, 2]])
    np.testing.assert_array_equal(lse[[0, 2]], alone[1][[0, 2]])


def test_a_row_empty_in_another_part_than_its_neighbour():
    q, k, v = random_qkv(10, queries=(2,))
    first, second = attend(q, k, v), attend(q, k, v)
    for row, (out, lse) in enumerate((first, second)):
        out[row], lse[row] = 0.0, -np.inf
    assert_same(merge([first, second]), attend(q, k, v))


def test_merging_step_by_step_equals_merging_at_once():
    q, k, v = random_qkv(12)
    empty = attend(q, k[:0], v[:0])
    result = merge([empty, empty])
    for start in range(0, 12, 4):
        result = merge([result, attend(q, k[start : start + 4], v[start : start + 4])])
    assert_same(result, attend(q, k, v))


def test_log_sum_exps_far_apart_or_far_from_zero_do_not_overflow():
    ones = np.ones((1, HEAD_DIM))
    for base in (0.0, 1e4, -1e4):
        out, lse = merge(
            [(ones, np.array([base])), (3 * ones, np.array([base + 200.0]))]
        )
        np.testing.assert_allclose(out, 3 * ones)
        np.testing.assert_allclose(lse, [base + 200.0])
    out, lse = merge([(ones, np.array([1e4])), (3 * ones, np.array([1e4]))])
    np.testing.assert_allclose(out, 2 * ones)
    np.testing.assert_allclose(lse, [1e4 + np.log(2)])


def test_outputs_keep_their_dtype():
    out, lse = jax.jit(merge_partials)(
        jnp.ones((2, 3, HEAD_DIM), jnp.bfloat16), jnp.zeros((2, 3), jnp.float32)
    )
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)
