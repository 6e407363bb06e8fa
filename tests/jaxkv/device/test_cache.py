import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, copy_blocks, init_cache, write_kv
from jaxkv.device.cache import fill_blocks
from tests.helpers import cache_config


def filled_cache(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), init_cache(config)
    )


def new_tokens(count, config, seed=1):
    shape = (2, count, config.num_kv_heads, config.head_dim)
    k, v = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(k), jnp.asarray(v)


def test_a_cache_takes_the_bytes_its_config_says():
    config = cache_config(kv_cache_dtype="bfloat16")
    cache = init_cache(config)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == config.total_bytes
    assert cache.num_blocks == 6
    assert cache.block_size == 4


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [(32, 8, 128, 131_072), (80, 8, 128, 327_680), (30, 3, 64, 23_040)],
    ids=["Llama-3.1-8B", "Llama-2-70B", "SmolLM2-135M"],
)
def test_bytes_per_token_count_kv_heads_and_both_k_and_v(
    layers, kv_heads, head_dim, expected
):
    config = CacheConfig(
        num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim, num_blocks=2
    )
    assert config.bytes_per_token == expected


def test_write_kv_changes_the_named_slots_of_the_named_layer_and_nothing_else():
    config = cache_config()
    before = filled_cache(config)
    k, v = new_tokens(3, config)
    slots = [5, 22, 11]
    after = write_kv(before, 1, k, v, jnp.asarray(slots, jnp.int32))
    expected = [np.array(before.layers[1].k), np.array(before.layers[1].v)]
    for token, slot in enumerate(slots):
        for blocks, new in zip(expected, (k, v), strict=True):
            blocks[slot // 4, :, slot % 4] = new[token]
    np.testing.assert_array_equal(after.layers[1].k, expected[0])
    np.testing.assert_array_equal(after.layers[1].v, expected[1])
    np.testing.assert_array_equal(after.layers[0].k, before.layers[0].k)
    np.testing.assert_array_equal(after.layers[0].v, before.layers[0].v)


def test_padding_writes_reach_the_null_block_only():
    config = cache_config()
    before = filled_cache(config)
    last_slot = 6 * 4 - 1
    k, v = new_tokens(8, config)
    slots = jnp.asarray([last_slot, last_slot - 1, last_slot - 2, 0, 0, 0, 0, 0])
    after = write_kv(before, 0, k, v, slots.astype(jnp.int32))
    np.testing.assert_array_equal(after.layers[0].k[1:5], before.layers[0].k[1:5])
    np.testing.assert_array_equal(after.layers[0].k[5, :, 3], k[0])
    np.testing.assert_array_equal(
        after.layers[0].k[5, :, 0], before.layers[0].k[5, :, 0]
    )


def test_copy_blocks_reads_everything_before_it_writes():
    before = filled_cache(cache_config())
    src, dst = jnp.asarray([1, 2, 0, 0]), jnp.asarray([2, 1, 0, 0])
    after = copy_blocks(before, src.astype(jnp.int32), dst.astype(jnp.int32))
    for old, new in zip(before.layers, after.layers, strict=True):
        for x, y in zip(old, new, strict=True):
            np.testing.assert_array_equal(y[1], x[2])
            np.testing.assert_array_equal(y[2], x[1])
            np.testing.assert_array_equal(y[3:], x[3:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fill_blocks_overwrites_the_named_blocks_of_every_layer(dtype):
    before = filled_cache(cache_config(kv_cache_dtype=dtype))
    block_ids = jnp.asarray([2, 5, 2], jnp.int32)
    after = fill_blocks(before, block_ids, jnp.float32(jnp.nan))
    for old, new in zip(before.layers, after.layers, strict=True):
        for x, y in zip(old, new, strict=True):
            assert y.dtype == dtype
            assert jnp.isnan(y[jnp.asarray([2, 5])]).all()
            kept = jnp.asarray([0, 1, 3, 4])
            np.testing.assert_array_equal(y[kept], x[kept])


def test_a_donated_cache_is_updated_in_place_and_gone():
    config = cache_config()
    cache = init_cache(config)
    k, v = new_tokens(2, config)
    write = jax.jit(write_kv, static_argnums=1, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "donated buffers were not usable"
        after = write(cache, 0, k, v, jnp.asarray([4, 5], jnp.int32))
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.layers[0].k)


@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("new_dtype", ["float32", "bfloat16"])
def test_the_pool_keeps_its_dtype_whatever_is_written(cache_dtype, new_dtype):
    config = cache_config(kv_cache_dtype=cache_dtype)
    cache = init_cache(config)
    k, v = (x.astype(new_dtype) for x in new_tokens(1, config))
    for slot in range(4, 14):
        cache = write_kv(cache, 0, k, v, jnp.asarray([slot], jnp.int32))
    assert {str(x.dtype) for x in jax.tree.leaves(cache)} == {cache_dtype}
    np.testing.assert_array_equal(cache.layers[0].k[3, :, 1], k[0].astype(cache_dtype))


def test_arguments_that_do_not_fit_the_cache_are_named():
    config = cache_config()
    cache = init_cache(config)
    k, v = new_tokens(2, config)
    slots = jnp.asarray([4, 5], jnp.int32)
    with pytest.raises(ValueError, match="layer 2 is outside the cache's 2 layers"):
        write_kv(cache, 2, k, v, slots)
    with pytest.raises(ValueError, match=r"k has shape \(2, 1, 8\).*\(2, 2, 8\)"):
        write_kv(cache, 0, k[:, :1], v, slots)
    with pytest.raises(ValueError, match=r"v has shape \(2, 2, 4\).*\(2, 2, 8\)"):
        write_kv(cache, 0, k, v[..., :4], slots)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"kv_cache_dtype": "int7"}, "kv_cache_dtype must be one of"),
        ({"num_blocks": 2**28, "block_size": 16}, r"slots.*2\*\*31"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cache_config(**changes)


def test_jax_index_facts_that_the_null_block_exists_for():
    x = jnp.zeros(4)
    one = jnp.ones(())
    np.testing.assert_array_equal(x.at[-1].set(one), [0, 0, 0, 1])
    np.testing.assert_array_equal(x.at[4].set(one), [0, 0, 0, 0])
