"""Ragged paged attention in plain XLA: correct everywhere, made for CPUs.

Work is cut in *query tiles* of one row each: rows with one query take tiles of one,
rows with more take tiles of `_TILE_Q`. A tile walks its row's keys `tile_kv` at a
time with the online softmax of FlashAttention (Dao et al., 2022), so it reads as
many blocks as the row has, whatever the width of the padded tables.

A batch with no more tokens than rows is a decoding one: it takes tiles of one
throughout, and the code for larger tiles is not compiled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_TILE_Q = 32
_TILE_KV = 128
_LARGE_NEGATIVE = -1e30  # finite, so that exp(masked - max) has no NaN


class _Options(NamedTuple):
    scale: float
    window: int | None
    soft_cap: float | None


class _Pool(NamedTuple):
    """What every tile reads."""

    k: jax.Array  # [num_blocks, kv_heads, block_size, head_dim]
    v: jax.Array  # [num_blocks, kv_heads, block_size, head_dim]
    tables: jax.Array  # [rows, width], width a multiple of blocks_per_tile
    blocks_per_tile: int


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def paged_attention_xla(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Attend as `paged_attention` says; see there for the arguments.

    Returns:
        The outputs in q's dtype and the float32 log-sum-exp of the scores.
    """
    tokens, q_heads, head_dim = q.shape
    block_size = k_blocks.shape[2]
    rows, width = block_tables.shape
    blocks_per_tile = min(width, max(1, _TILE_KV // block_size))
    pool = _Pool(
        k=k_blocks,
        v=v_blocks,
        tables=jnp.pad(block_tables, ((0, 0), (0, -width % blocks_per_tile))),
        blocks_per_tile=blocks_per_tile,
    )
    options = _Options(scale=scale, window=window, soft_cap=soft_cap)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]

    # A tile may reach past the last token, and slices clamp instead: make room.
    tile_q = min(_TILE_Q, tokens)
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    result = (
        jnp.zeros((tokens + tile_q, q_heads, head_dim), q.dtype),
        jnp.full((tokens + tile_q, q_heads), -jnp.inf, jnp.float32),
    )

    def all_rows(size: int, is_mine: jax.Array, result: tuple) -> tuple:
        """Do the rows that `is_mine` names in tiles of `size` queries."""
        num_tiles = jnp.where(is_mine, (q_lens + size - 1) // size, 0)

        def one_row(row: jax.Array, result: tuple) -> tuple:
            return lax.fori_loop(
                0, num_tiles[row], functools.partial(tile, size, row), result
            )

        # int32 bounds: with x64 enabled the row would be an int64 among int32s.
        return lax.fori_loop(jnp.int32(0), jnp.int32(rows), one_row, result)

    def tile(size: int, row: jax.Array, index: jax.Array, result: tuple) -> tuple:
        first = index * size
        start = cu_q_lens[row] + first
        position = kv_lens[row] - q_lens[row] + first
        out, lse = _attend_tile(
            lax.dynamic_slice_in_dim(padded_q, start, size),
            position + jnp.arange(size, dtype=jnp.int32),
            jnp.minimum(kv_lens[row], position + size),
            row,
            pool,
            options,
        )
        is_real = jnp.arange(size, dtype=jnp.int32) < q_lens[row] - first
        return _write_tile(result, (out.astype(q.dtype), lse), start, is_real)

    if tokens <= rows:
        result = all_rows(1, q_lens > 0, result)
    else:
        result = all_rows(1, q_lens == 1, result)
        result = all_rows(tile_q, q_lens > 1, result)
    out, lse = result
    return out[:tokens], lse[:tokens]


def _write_tile(
    result: tuple[jax.Array, jax.Array],
    tile: tuple[jax.Array, jax.Array],
    start: jax.Array,
    is_real: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write a tile's rows that are its own; the rest may be the next row's."""

    def write(whole: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(whole, start, new.shape[0])
        keep = is_real.reshape((-1,) + (1,) * (new.ndim - 1))
        return lax.dynamic_update_slice_in_dim(
            whole, jnp.where(keep, new, old), start, axis=0
        )

    return write(result[0], tile[0]), write(result[1], tile[1])


def _attend_tile(
    q: Float[Array, "tile_q q_heads head_dim"],
    positions: Int32[Array, " tile_q"],
    kv_end: Int32[Array, ""],
    row: Int32[Array, ""],
    pool: _Pool,
    options: _Options,
) -> tuple[Float[Array, "tile_q q_heads head_dim"], Float[Array, "tile_q q_heads"]]:
    """Attend from one tile of one row's queries to keys [0, kv_end)."""
    tile_q, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = pool.k.shape
    tile_kv = pool.blocks_per_tile * block_size
    group = q_heads // kv_heads
    # [kv_heads, tile_q * group, head_dim]: one product a kv head
    grouped = q.astype(jnp.float32) * options.scale
    grouped = grouped.reshape(tile_q, kv_heads, group, head_dim).swapaxes(0, 1)
    grouped = grouped.reshape(kv_heads, tile_q * group, head_dim)
    query_position = jnp.repeat(positions, group)[:, None]

    def step(index: jax.Array, carry: tuple) -> tuple:
        top, total, acc = carry
        ids = lax.dynamic_slice(
            pool.tables, (row, index * pool.blocks_per_tile), (1, pool.blocks_per_tile)
        )[0]
        key = index * tile_kv + jnp.arange(tile_kv, dtype=jnp.int32)[None, :]
        visible = (key <= query_position) & (key < kv_end)
        if options.window is not None:
            visible &= key > query_position - options.window
        # Slots that hold nothing may hold NaN, and 0 * NaN is NaN.
        is_written = (key[0] < kv_end).reshape(pool.blocks_per_tile, 1, block_size, 1)
        k = pool.k[ids].astype(jnp.float32)
        v = jnp.where(is_written, pool.v[ids].astype(jnp.float32), 0.0)
        scores = jnp.einsum("hqd,bhtd->hqbt", grouped, k)
        scores = scores.reshape(kv_heads, tile_q * group, tile_kv)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(visible[None], scores, _LARGE_NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(visible[None], jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        weighted = jnp.einsum(
            "hqbt,bhtd->hqd",
            weights.reshape(kv_heads, -1, pool.blocks_per_tile, block_size),
            v,
        )
        return (
            new_top,
            total * decay + jnp.sum(weights, axis=-1),
            acc * decay[..., None] + weighted,
        )

    first = jnp.int32(0)
    if options.window is not None:
        first = jnp.maximum(positions[0] - options.window + 1, 0) // tile_kv
    last = (kv_end + tile_kv - 1) // tile_kv
    shape = (kv_heads, tile_q * group)
    top, total, acc = lax.fori_loop(
        first,
        last,
        step,
        (
            jnp.full(shape, _LARGE_NEGATIVE, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        ),
    )
    safe_total = jnp.where(total == 0.0, 1.0, total)
    out = acc / safe_total[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(safe_total))

    def ungroup(x: jax.Array) -> jax.Array:
        tail = x.shape[2:]
        x = x.reshape(kv_heads, tile_q, group, *tail).swapaxes(0, 1)
        return x.reshape(tile_q, q_heads, *tail)

    return ungroup(out), ungroup(lse)
