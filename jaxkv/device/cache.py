"""The device half of the cache: arrays, and pure functions over them.

A *block* holds `block_size` tokens of one layer, and one block id means the same
place in every layer. A *slot* is one token's place:
`slot = block_id * block_size + offset`. Block 0 is never handed out, so padding may
write to it and read from it freely.

Nothing here is jitted or donated: the caller jits and donates. A donated cache is
updated in place; without donation every write copies the pool.
"""

from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxkv.config import CacheConfig
from jaxkv.device.codec import (
    Stored,
    encode,
    format_of,
    init_blocks,
    poison,
    vector_shape,
)


class LayerKV(NamedTuple):
    """One layer's keys and values; replaced, never mutated.

    Each is an array [num_blocks, kv_heads, block_size, head_dim], or a `Quantized` of
    as many vectors; the two may have different formats.
    """

    k: Stored
    v: Stored


class KVCache(NamedTuple):
    """Every layer's keys and values: what a jitted step takes, donates and returns."""

    layers: tuple[LayerKV, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return vector_shape(self.layers[0].k)[0]

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return vector_shape(self.layers[0].k)[2]


def init_cache(
    config: CacheConfig, sharding: jax.sharding.Sharding | None = None
) -> KVCache:
    """Allocate an empty cache, filled with zero vectors.

    Args:
        config: The cache's shape and formats.
        sharding: Where each array lies. All begin with the axes [num_blocks, kv_heads,
            block_size], and scales of 8 bits have no more; `kv_heads` is the one to
            shard, over a mesh axis of type Auto. None: JAX's default device.

    Returns:
        A cache of `config.total_bytes` bytes.
    """
    shape = (
        config.num_blocks,
        config.num_kv_heads,
        config.block_size,
        config.head_dim,
    )

    return KVCache(
        layers=tuple(
            LayerKV(
                k=init_blocks(k_format, shape, sharding),
                v=init_blocks(v_format, shape, sharding),
            )
            for k_format, v_format in config.formats
        )
    )


def write_blocks(
    blocks: Stored,
    new: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> Stored:
    """Store one layer's new keys (or values) at their slots.

    Args:
        blocks: The layer's blocks, as they were before this step.
        new: One row per token of the batch, padding included; brought into the
            blocks' format.
        slot_mapping: Slot of each token. Real tokens have distinct slots outside
            `NULL_BLOCK`; padding tokens have slots inside it.

    Returns:
        The blocks with `new` in place and every other slot unchanged.
    """
    block_size = vector_shape(blocks)[2]
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size

    def write(array: jax.Array, encoded: jax.Array) -> jax.Array:
        if len(encoded) > 1:
            return array.at[block_ids, :, offsets].set(encoded)
        # A scatter of one slot would become reads of what lies there, and two kernels.
        start = (block_ids[0], 0, offsets[0], *[0] * (array.ndim - 3))
        return lax.dynamic_update_slice(array, encoded[:, :, None], start)

    return jax.tree.map(write, blocks, encode(new, format_of(blocks)))


@no_type_check  # it checks its own arguments, in tests and elsewhere
def write_kv(
    cache: KVCache,
    layer: int,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> KVCache:
    """Store one layer's new keys and values.

    Values are the caller's to check before the step: inside jit nothing raises, a
    slot past the pool is dropped and a negative one wraps around, and the slot of a
    step's only token is clamped.

    Args:
        cache: Not donated here; donate it in the jitted function that calls this.
        layer: Index of the layer.
        k: New keys, after RoPE, padding included.
        v: New values.
        slot_mapping: See `write_blocks`.

    Returns:
        A cache in which only the named slots of the named layer differ.

    Raises:
        ValueError: `layer`, the heads or the head_dim do not fit the cache; or k or v
            are no floats.
    """
    if not 0 <= layer < len(cache.layers):
        raise ValueError(
            f"layer {layer} is outside the cache's {len(cache.layers)} layers"
        )
    _, kv_heads, _, head_dim = vector_shape(cache.layers[layer].k)
    for name, new in (("k", k), ("v", v)):
        expected = (slot_mapping.shape[0], kv_heads, head_dim)
        if not jnp.issubdtype(new.dtype, jnp.floating):
            raise ValueError(f"{name} must be of floats, got {new.dtype}")
        if new.shape != expected:
            raise ValueError(
                f"{name} has shape {new.shape}, expected [tokens, kv_heads, head_dim]"
                f" = {expected}"
            )
    old = cache.layers[layer]
    written = LayerKV(
        k=write_blocks(old.k, k, slot_mapping),
        v=write_blocks(old.v, v, slot_mapping),
    )
    return KVCache(layers=(*cache.layers[:layer], written, *cache.layers[layer + 1 :]))


def gather_blocks(
    cache: KVCache, block_ids: Int32[Array, " blocks"]
) -> tuple[LayerKV, ...]:
    """Read whole blocks of every layer, K and V both, to be swapped out.

    Args:
        cache: Not donated: what is returned are new arrays, which no later step that
            takes the cache donated can overwrite.
        block_ids: Blocks to read.

    Returns:
        The blocks of each layer, in the given order.
    """
    return jax.tree.map(lambda blocks: blocks[block_ids], cache.layers)


def scatter_blocks(
    cache: KVCache, content: tuple[LayerKV, ...], block_ids: Int32[Array, " blocks"]
) -> KVCache:
    """Overwrite whole blocks of every layer with what `gather_blocks` read.

    Args:
        cache: Not donated here.
        content: The blocks of each layer.
        block_ids: Where to put them; `NULL_BLOCK` for those that are not wanted.
            The others must be distinct.
    """
    return KVCache(
        layers=jax.tree.map(
            lambda blocks, new: blocks.at[block_ids].set(new), cache.layers, content
        )
    )


def poison_blocks(cache: KVCache, block_ids: Int32[Array, " blocks"]) -> KVCache:
    """Overwrite whole blocks of every layer with NaN, K and V both.

    Args:
        cache: Not donated here.
        block_ids: Blocks to overwrite; one may be named several times.
    """
    return KVCache(
        layers=tuple(
            LayerKV(k=poison(layer.k, block_ids), v=poison(layer.v, block_ids))
            for layer in cache.layers
        )
    )


def copy_blocks(
    cache: KVCache,
    src_ids: Int32[Array, " copies"],
    dst_ids: Int32[Array, " copies"],
) -> KVCache:
    """Copy whole blocks, in every layer, K and V both.

    All reads come before any write, so a block may be both source and target. The
    pair (0, 0) is padding. Targets outside `NULL_BLOCK` must be distinct.

    Args:
        cache: Not donated here.
        src_ids: Blocks to read.
        dst_ids: Blocks to overwrite, one for each source.
    """

    def copy(blocks: jax.Array) -> jax.Array:
        return blocks.at[dst_ids].set(blocks[src_ids])

    return jax.tree.map(copy, cache)
