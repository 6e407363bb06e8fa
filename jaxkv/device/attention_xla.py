"""Ragged paged attention in plain XLA: correct everywhere, made for CPUs.

Two kinds of work, both with the online softmax of FlashAttention (Dao et al., 2022),
which reads as many blocks as a row has, whatever the width of the padded tables:

- *Single queries*: rows that decode. They are sorted by length and done `_GROUP` at a
  time, so that every operation is large enough for all cores and the members of a
  group end together.
- *Query tiles* of one row each: rows that prefill, `_TILE_Q` queries at a time.

A batch with no more tokens than rows is a decoding one. There each token is a single
query, and the code for query tiles is not even compiled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

_GROUP = 8
_TILE_Q = 64
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

    @property
    def tile_kv(self) -> int:
        return self.blocks_per_tile * self.k.shape[2]


class _Softmax(NamedTuple):
    """The online softmax of queries, over the keys seen so far."""

    top: jax.Array  # [members, kv_heads, queries], the largest score
    total: jax.Array  # [members, kv_heads, queries], sum of exp(score - top)
    acc: jax.Array  # [members, kv_heads, queries, head_dim], weighted values


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
    tokens, q_heads, _ = q.shape
    rows, width = block_tables.shape
    blocks_per_tile = min(width, max(1, _TILE_KV // k_blocks.shape[2]))
    pool = _Pool(
        k=k_blocks,
        v=v_blocks,
        tables=jnp.pad(block_tables, ((0, 0), (0, -width % blocks_per_tile))),
        blocks_per_tile=blocks_per_tile,
    )
    options = _Options(scale=scale, window=window, soft_cap=soft_cap)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]

    # A tile may reach past the last token, and slices clamp instead: make room. The
    # first line of that room also takes what no token wants.
    tile_q = min(_TILE_Q, tokens)
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    result = (
        jnp.zeros((tokens + tile_q, q_heads, q.shape[2]), q.dtype),
        jnp.full((tokens + tile_q, q_heads), -jnp.inf, jnp.float32),
    )
    if tokens <= rows:
        token = jnp.arange(tokens, dtype=jnp.int32)
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
        row = jnp.minimum(row, rows - 1)
        kv_ends = kv_lens[row] - cu_q_lens[row + 1] + token + 1
        kv_ends = jnp.where(token < cu_q_lens[-1], kv_ends, 0)
        result = _single_queries(
            result, padded_q, token, row, kv_ends, pool, options
        )
    else:
        row = jnp.arange(rows, dtype=jnp.int32)
        kv_ends = jnp.where(q_lens == 1, kv_lens, 0)
        result = _single_queries(
            result, padded_q, cu_q_lens[:-1], row, kv_ends, pool, options
        )
        result = _query_tiles(
            result, padded_q, tile_q, kv_lens, cu_q_lens, pool, options
        )
    out, lse = result
    return out[:tokens], lse[:tokens]


def _single_queries(
    result: tuple[jax.Array, jax.Array],
    padded_q: Float[Array, "padded_tokens q_heads head_dim"],
    tokens: Int32[Array, " singles"],
    rows: Int32[Array, " singles"],
    kv_ends: Int32[Array, " singles"],
    pool: _Pool,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Attend from single queries, each to keys [0, kv_end) of its row.

    A kv_end of 0 means that there is no query: its result goes to the room behind the
    tokens.
    """
    singles = kv_ends.shape[0]
    group = min(_GROUP, singles)
    nowhere = result[0].shape[0] - 1
    order = jnp.argsort(-kv_ends)
    pad = (0, -singles % group)
    kv_ends = jnp.pad(kv_ends[order], pad)
    rows = jnp.pad(rows[order], pad)
    tokens = jnp.pad(tokens[order], pad)
    num_singles = jnp.sum(kv_ends > 0, dtype=jnp.int32)

    def one_group(
        index: jax.Array, result: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        first = index * group
        row = lax.dynamic_slice_in_dim(rows, first, group)
        kv_end = lax.dynamic_slice_in_dim(kv_ends, first, group)
        token = lax.dynamic_slice_in_dim(tokens, first, group)
        out, lse = _attend(
            padded_q[token][:, None], (kv_end - 1)[:, None], kv_end, row, pool, options
        )
        token = jnp.where(kv_end > 0, token, nowhere)
        return (
            result[0].at[token].set(out[:, 0].astype(padded_q.dtype)),
            result[1].at[token].set(lse[:, 0]),
        )

    num_groups = (num_singles + group - 1) // group
    return lax.fori_loop(jnp.int32(0), num_groups, one_group, result)


def _query_tiles(
    result: tuple[jax.Array, jax.Array],
    padded_q: Float[Array, "padded_tokens q_heads head_dim"],
    tile_q: int,
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    pool: _Pool,
    options: _Options,
) -> tuple[jax.Array, jax.Array]:
    """Attend from the rows with several queries, one row and tile at a time."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    num_tiles = jnp.where(q_lens > 1, (q_lens + tile_q - 1) // tile_q, 0)
    place = jnp.arange(tile_q, dtype=jnp.int32)

    def one_tile(
        row: jax.Array, index: jax.Array, result: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        first = index * tile_q
        start = cu_q_lens[row] + first
        position = kv_lens[row] - q_lens[row] + first
        out, lse = _attend(
            lax.dynamic_slice_in_dim(padded_q, start, tile_q)[None],
            (position + place)[None],
            jnp.minimum(kv_lens[row], position + tile_q)[None],
            row[None],
            pool,
            options,
        )
        is_real = place < q_lens[row] - first
        return _write_tile(
            result, (out[0].astype(padded_q.dtype), lse[0]), start, is_real
        )

    def one_row(
        row: jax.Array, result: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return lax.fori_loop(
            jnp.int32(0), num_tiles[row], functools.partial(one_tile, row), result
        )

    return lax.fori_loop(jnp.int32(0), jnp.int32(len(kv_lens)), one_row, result)


def _write_tile(
    result: tuple[jax.Array, jax.Array],
    tile: tuple[jax.Array, jax.Array],
    start: jax.Array,
    is_real: Bool[Array, " tile_q"],
) -> tuple[jax.Array, jax.Array]:
    """Write a tile's lines that are its own; the rest may be the next row's."""

    def write(whole: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(whole, start, new.shape[0])
        keep = is_real.reshape((-1,) + (1,) * (new.ndim - 1))
        return lax.dynamic_update_slice_in_dim(
            whole, jnp.where(keep, new, old), start, axis=0
        )

    return write(result[0], tile[0]), write(result[1], tile[1])


def _attend(
    q: Float[Array, "members queries q_heads head_dim"],
    positions: Int32[Array, "members queries"],
    kv_ends: Int32[Array, " members"],
    rows: Int32[Array, " members"],
    pool: _Pool,
    options: _Options,
) -> tuple[
    Float[Array, "members queries q_heads head_dim"],
    Float[Array, "members queries q_heads"],
]:
    """Attend from each member's queries to keys [0, kv_end) of its row."""
    members, queries, q_heads, head_dim = q.shape
    kv_heads = pool.k.shape[1]
    group = q_heads // kv_heads
    # [members, kv_heads, queries * group, head_dim]: one product a member and kv head
    grouped = q.astype(jnp.float32) * options.scale
    grouped = grouped.reshape(members, queries, kv_heads, group, head_dim)
    grouped = grouped.swapaxes(1, 2).reshape(members, kv_heads, -1, head_dim)
    positions = jnp.repeat(positions, group, axis=1)

    first = jnp.int32(0)
    if options.window is not None:
        first_key = jnp.min(positions) - options.window + 1
        first = jnp.maximum(first_key, 0) // pool.tile_kv
    last = (jnp.max(kv_ends) + pool.tile_kv - 1) // pool.tile_kv
    shape = grouped.shape[:3]
    softmax = lax.fori_loop(
        first,
        last,
        lambda index, softmax: _add_tile(
            softmax, index, grouped, positions, kv_ends, rows, pool, options
        ),
        _Softmax(
            top=jnp.full(shape, _LARGE_NEGATIVE, jnp.float32),
            total=jnp.zeros(shape, jnp.float32),
            acc=jnp.zeros((*shape, head_dim), jnp.float32),
        ),
    )
    is_empty = softmax.total == 0.0
    safe_total = jnp.where(is_empty, 1.0, softmax.total)
    out = softmax.acc / safe_total[..., None]
    lse = jnp.where(is_empty, -jnp.inf, softmax.top + jnp.log(safe_total))

    def ungroup(x: jax.Array) -> jax.Array:
        tail = x.shape[3:]
        x = x.reshape(members, kv_heads, queries, group, *tail).swapaxes(1, 2)
        return x.reshape(members, queries, q_heads, *tail)

    return ungroup(out), ungroup(lse)


def _add_tile(
    softmax: _Softmax,
    index: Int32[Array, ""],
    q: Float[Array, "members kv_heads queries head_dim"],
    positions: Int32[Array, "members queries"],
    kv_ends: Int32[Array, " members"],
    rows: Int32[Array, " members"],
    pool: _Pool,
    options: _Options,
) -> _Softmax:
    """Take in the keys [index * tile_kv, (index + 1) * tile_kv) of each row."""
    first_block = index * pool.blocks_per_tile
    ids = lax.dynamic_slice_in_dim(pool.tables, first_block, pool.blocks_per_tile, 1)
    ids = ids[rows]
    key = index * pool.tile_kv + jnp.arange(pool.tile_kv, dtype=jnp.int32)[None, :]
    is_written = key < kv_ends[:, None]
    visible = is_written[:, None] & (key[:, None] <= positions[:, :, None])
    if options.window is not None:
        visible &= key[:, None] > positions[:, :, None] - options.window
    visible = visible[:, None]

    scores = jnp.einsum("mhqd,mhtd->mhqt", q, _read_tile(pool.k, ids))
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, _LARGE_NEGATIVE)
    top = jnp.maximum(softmax.top, jnp.max(scores, axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
    decay = jnp.exp(softmax.top - top)
    # Slots that hold nothing may hold NaN, and 0 * NaN is NaN.
    v = jnp.where(is_written[:, None, :, None], _read_tile(pool.v, ids), 0.0)
    return _Softmax(
        top=top,
        total=softmax.total * decay + jnp.sum(weights, axis=-1),
        acc=softmax.acc * decay[..., None]
        + jnp.einsum("mhqt,mhtd->mhqd", weights, v),
    )


def _read_tile(
    blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    ids: Int32[Array, "members tile_blocks"],
) -> Float[Array, "members kv_heads tile_kv head_dim"]:
    """Read each member's blocks as float32, head by head.

    A (block, head) is contiguous in the pool, so it is gathered as one line; gathering
    blocks and swapping axes afterwards takes twice as long on CPU.
    """
    num_blocks, kv_heads, block_size, head_dim = blocks.shape
    lines = blocks.reshape(num_blocks * kv_heads, block_size * head_dim)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    tile = lines[ids[:, None, :] * kv_heads + head]
    members = ids.shape[0]
    return tile.reshape(members, kv_heads, -1, head_dim).astype(jnp.float32)
