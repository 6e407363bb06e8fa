import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import CacheConfig, copy_blocks, init_cache, write_kv
from jaxkv.device.cache import gather_blocks, poison_blocks, scatter_blocks
from jaxkv.device.codec import Quantized, decode
from tests.helpers import cache_config
from tests.low_bit import LOW_BIT, MIXED, decoded


def filled_cache(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), init_cache(config)
    )


FORMATS = (*LOW_BIT, *MIXED)


def low_bit_config(kv_cache_dtype, **changes):
    return cache_config(
        kv_cache_dtype=kv_cache_dtype, kv_scales=((2.0, 4.0), (3.0, 1.5)), **changes
    )


def vectors_of_all_slots(config):
    """Keys and values whose sizes differ by slot and head, from 1 to 100."""
    num_slots = config.num_blocks * config.block_size
    k, v = new_tokens(num_slots, config)
    sizes = np.random.default_rng(2).permutation(num_slots * config.num_kv_heads)
    sizes = 10 ** (2 * sizes / len(sizes)).reshape(num_slots, -1, 1)
    return np.asarray(k) * sizes, np.asarray(v) * sizes[::-1]


def written_cache(config):
    """A cache each of whose slots was written."""
    k, v = (jnp.asarray(x, jnp.float32) for x in vectors_of_all_slots(config))
    cache = init_cache(config)
    slots = jnp.arange(len(k), dtype=jnp.int32)
    for layer in range(config.num_layers):
        cache = write_kv(cache, layer, k, v, slots)
    return cache


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


@pytest.mark.parametrize("dtype", FORMATS)
def test_poisoned_blocks_are_nan_in_every_layer_and_no_others(dtype):
    before = written_cache(low_bit_config(dtype))
    after = poison_blocks(before, jnp.asarray([2, 5, 2], jnp.int32))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(before.layers, after.layers, strict=True):
        for x, y in zip(old, new, strict=True):
            x, y = (np.asarray(decode(stored)) for stored in (x, y))
            assert np.isnan(y[[2, 5]]).all()
            np.testing.assert_array_equal(y[[0, 1, 3, 4]], x[[0, 1, 3, 4]])


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_low_bit_cache_takes_the_bytes_its_config_says(dtype, head_dim):
    config = low_bit_config(dtype, head_dim=head_dim, skip_layers=(1,))
    cache = init_cache(config)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == config.total_bytes
    assert (cache.num_blocks, cache.block_size) == (6, 4)
    assert {x.dtype for x in cache.layers[1]} == {jnp.dtype("bfloat16")}
    assert any(isinstance(x, Quantized) for x in cache.layers[0])


@pytest.mark.parametrize("head_dim", [80, 96])
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_pool_filled_to_the_last_slot_gives_back_every_vector(dtype, head_dim):
    """Vectors of very different sizes, so that a neighbour's scale would show."""
    config = low_bit_config(dtype, head_dim=head_dim, skip_layers=(1,))
    k, v = vectors_of_all_slots(config)
    cache = written_cache(config)
    for layer in cache.layers:
        for stored, new in zip(layer, (k, v), strict=True):
            by_block = new.reshape(6, 4, 2, head_dim).swapaxes(1, 2)
            size = np.abs(by_block).max(-1, keepdims=True)
            error = np.abs(decoded(stored) - by_block) / size
            assert error.max() < 0.15


@pytest.mark.parametrize("dtype", FORMATS)
def test_b60_whatever_moves_a_block_moves_its_scales(dtype):
    """Copied, and swapped out and in elsewhere: the same bytes of every array."""
    config = low_bit_config(dtype)
    cache = written_cache(config)
    before = jax.tree.map(np.array, cache)
    content = gather_blocks(cache, jnp.asarray([3, 1], jnp.int32))
    cache = copy_blocks(
        cache, jnp.asarray([4, 0], jnp.int32), jnp.asarray([5, 0], jnp.int32)
    )
    cache = scatter_blocks(cache, content, jnp.asarray([2, 0], jnp.int32))
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True)
    for old, new in leaves:
        np.testing.assert_array_equal(new[5], old[4])
        np.testing.assert_array_equal(new[2], old[3])
        np.testing.assert_array_equal(new[jnp.asarray([1, 3, 4])], old[[1, 3, 4]])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_write_of_low_bit_vectors_changes_its_slots_only(dtype):
    config = low_bit_config(dtype)
    cache = written_cache(config)
    before = jax.tree.map(np.array, cache)
    k, v = new_tokens(2, config, seed=5)
    after = write_kv(cache, 1, 1e3 * k, 1e3 * v, jnp.asarray([9, 22], jnp.int32))
    for index, expected in ((0, []), (1, [[2, 1], [5, 2]])):
        for old, new in zip(before.layers[index], after.layers[index], strict=True):
            pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
            differences = [
                (np.asarray(y) != x).reshape(6, 2, 4, -1).any(axis=(1, 3))
                for x, y in pairs
            ]
            assert np.argwhere(np.any(differences, axis=0)).tolist() == expected


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


@pytest.mark.parametrize(
    "cache_dtype", ["float32", "int8", "fp8_e4m3", "int4", "int4_asymmetric"]
)
def test_a_steps_only_token_is_written_like_one_of_several(cache_dtype):
    config = cache_config(kv_cache_dtype=cache_dtype, head_dim=32)
    k, v = new_tokens(2, config)
    # The second of several is padding.
    several = write_kv(init_cache(config), 1, k, v, jnp.asarray([22, 0], jnp.int32))
    alone = write_kv(init_cache(config), 1, k[:1], v[:1], jnp.asarray([22], jnp.int32))
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(several), strict=True)
    changed = 0
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours[1:], theirs[1:])
        changed += bool(np.any(np.asarray(ours, np.float32)))
    assert changed >= 2


def test_arguments_that_do_not_fit_the_cache_are_named():
    config = cache_config()
    cache = init_cache(config)
    k, v = new_tokens(2, config)
    slots = jnp.asarray([4, 5], jnp.int32)
    with pytest.raises(ValueError, match="layer 2 is outside the cache's 2 layers"):
        write_kv(cache, 2, k, v, slots)
    with pytest.raises(ValueError, match=r"k has shape \(2, 1, 8\).*\(2, 2, 8\)"):
        write_kv(cache, 0, k[:, :1], v, slots)
    with pytest.raises(ValueError, match="v must be of floats, got int32"):
        write_kv(cache, 0, k, v.astype(jnp.int32), slots)
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
