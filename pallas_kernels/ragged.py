"""Ragged batches as query tiles: which row and tokens each tile holds.

A *query tile* holds the query heads that share a KV head, of a few consecutive tokens
of one row. It never holds two rows, so all of it reads the same keys, and every copy is
dense whatever the rows' lengths. Its *lines*: line i is head i % group of the tile's
token i // group.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class QueryTiles(NamedTuple):
    """Which tokens each tile holds; a tile of none has kv_end 0.

    Attributes:
        row: The row of the tile.
        token: Its first token.
        position: That token's position in its row.
        kv_end: The position after its last token's.
        first_of_row: [rows], each row's first tile.
    """

    row: Int32[Array, " tiles"]
    token: Int32[Array, " tiles"]
    position: Int32[Array, " tiles"]
    kv_end: Int32[Array, " tiles"]
    first_of_row: Int32[Array, " rows"]


def query_tiles(
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " offsets"],
    tokens: int,
    tokens_per_tile: int,
) -> QueryTiles:
    """Cut each row's queries into tiles; there are as many as there could be."""
    rows = len(kv_lens)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    ends = jnp.cumsum((q_lens + tokens_per_tile - 1) // tokens_per_tile)
    ends = ends.astype(jnp.int32)
    first_of_row = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    most = (tokens + rows * (tokens_per_tile - 1)) // tokens_per_tile
    tile = jnp.arange(min(most, tokens), dtype=jnp.int32)
    row = _row_of(ends, tile)
    is_real = row < rows
    row = jnp.minimum(row, rows - 1)
    offset = (tile - first_of_row[row]) * tokens_per_tile
    position = kv_lens[row] - q_lens[row] + offset
    kv_end = jnp.minimum(position + tokens_per_tile, kv_lens[row])
    return QueryTiles(
        row=row,
        token=jnp.where(is_real, cu_q_lens[row] + offset, 0),
        position=position,
        kv_end=jnp.where(is_real, jnp.maximum(kv_end, 0), 0),
        first_of_row=first_of_row,
    )


def pack(
    q: Float[Array, "tokens q_heads head_dim"],
    tiles: QueryTiles,
    *,
    kv_heads: int,
    tokens_per_tile: int,
    lines: int,
) -> Float[Array, "tiles kv_heads lines head_dim"]:
    """Lay the queries out tile by tile; lines of no query hold anything finite."""
    tokens, q_heads, head_dim = q.shape
    group = q_heads // kv_heads
    grouped = q.reshape(tokens, kv_heads, group, head_dim)
    if tokens_per_tile == 1:  # tile t is token t
        return jnp.pad(grouped, ((0, 0), (0, 0), (0, lines - group), (0, 0)))
    line = jnp.arange(lines, dtype=jnp.int32)
    token = jnp.minimum(tiles.token[:, None] + (line // group)[None], tokens - 1)
    return grouped[token, :, (line % group)[None]].swapaxes(1, 2)


def unpack(
    out: Float[Array, "tiles kv_heads lines head_dim"],
    lse: Float[Array, "tiles kv_heads lines"],
    tiles: QueryTiles,
    cu_q_lens: Int32[Array, " offsets"],
    *,
    q_shape: tuple[int, ...],
    tokens_per_tile: int,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Give each query its line; padding gets output 0 and log-sum-exp -inf."""
    tokens, q_heads, _ = q_shape
    num_tiles, kv_heads, _ = lse.shape
    group = q_heads // kv_heads
    if tokens_per_tile == 1:  # a tile of no token has seen no key
        return (
            out[:, :, :group].reshape(q_shape),
            lse[:, :, :group].reshape(tokens, q_heads),
        )
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = _row_of(cu_q_lens[1:], token)
    row = jnp.minimum(row, len(cu_q_lens) - 2)
    offset = token - cu_q_lens[row]
    tile = tiles.first_of_row[row] + offset // tokens_per_tile
    tile = jnp.clip(tile, 0, num_tiles - 1)
    line = (offset % tokens_per_tile)[:, None] * group + jnp.arange(group)[None]
    place = (tile[:, None], slice(None), line)
    out, lse = (x[place].swapaxes(1, 2) for x in (out, lse))  # [tokens, kv_heads, ...]
    is_real = (token < cu_q_lens[-1])[:, None]
    return (
        jnp.where(is_real[..., None], out.reshape(q_shape), jnp.zeros((), out.dtype)),
        jnp.where(is_real, lse.reshape(tokens, q_heads), -jnp.inf),
    )


def _row_of(
    ends: Int32[Array, " rows"], place: Int32[Array, " places"]
) -> Int32[Array, " places"]:
    """Return the row that each place lies in; the number of rows past the last.

    Compares with all: a binary search is a loop of launches on a GPU.
    """
    row = jnp.searchsorted(ends, place, side="right", method="compare_all")
    return row.astype(jnp.int32)
