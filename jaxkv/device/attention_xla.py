"""Ragged paged attention in plain XLA: correct everywhere, made for CPUs.

Keys are read a *tile* at a time; each tile gives a partial softmax, and partial ones
are folded together by their largest scores, as in FlashAttention (Dao et al., 2022).
So a row costs what its own length does, whatever the width of the padded tables. There
are two kinds of work:

- *Single queries*: rows that decode. The tiles of all of them form one list, done
  `_GROUP` tiles at a time, whichever rows they belong to: operations are large enough
  for all cores and little is computed in vain.
- *Query tiles* of one row each: rows that prefill, `_TILE_Q` queries at a time.

A batch padded to no more tokens than rows is taken for a decoding one: each token is a
single query, and the code for query tiles is not even compiled. Rows of several tokens
come out right there too, but slowly; the host sends those to other shapes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv.device.codec import Stored, decode, vector_shape

_GROUP = 16
_SINGLE_TILE_KV = 64
_TILE_Q = 32
_TILE_KV = 128
_LARGE_NEGATIVE = -1e30  # finite, so that exp(masked - max) has no NaN


class _Options(NamedTuple):
    scale: float
    window: int | None
    soft_cap: float | None


class _Pool(NamedTuple):
    """What every tile reads."""

    k: Stored
    v: Stored
    tables: jax.Array  # [rows, width], width a multiple of blocks_per_tile
    blocks_per_tile: int

    @property
    def kv_heads(self) -> int:
        return vector_shape(self.k)[1]

    @property
    def tile_kv(self) -> int:
        return self.blocks_per_tile * vector_shape(self.k)[2]


class _Tiles(NamedTuple):
    """A tile of keys for each member of a group; keys count from the tile's first."""

    ids: jax.Array  # [members, blocks_per_tile], the tile's blocks
    first: jax.Array  # [members, queries], the first key that a query sees
    last: jax.Array  # [members, queries], and the last
    end: jax.Array  # [members], from where on nothing was written
    is_whole: jax.Array  # [], whether all slots of all tiles were written


class _SingleTiles(NamedTuple):
    """The tiles of all single queries, as one list."""

    single: jax.Array  # [items]
    ids: jax.Array  # [items, blocks_per_tile]
    first: jax.Array  # [items]
    end: jax.Array  # [items]; 0 where the list has ended


class _Softmax(NamedTuple):
    """The softmax of queries over some of their keys.

    `members` are single queries, or the one query tile.
    """

    top: jax.Array  # [members, kv_heads, queries], the largest score
    total: jax.Array  # [members, kv_heads, queries], sum of exp(score - top)
    acc: jax.Array  # [members, kv_heads, queries, head_dim], weighted values


@functools.partial(
    jax.jit, static_argnames=("scale", "window", "soft_cap", "return_lse")
)
def paged_attention_xla(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Stored,
    v_blocks: Stored,
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Attend as `paged_attention` says; see there for the arguments.

    Keys and values in a low-bit format are decoded a tile at a time, and taken as
    `decode` gives them.

    Returns:
        The outputs in q's dtype, and with `return_lse` the float32 log-sum-exp of the
        scores.
    """
    options = _Options(scale=scale, window=window, soft_cap=soft_cap)
    arguments = (q, k_blocks, v_blocks, block_tables, kv_lens, cu_q_lens)
    out, lse = _attend(*arguments, options)
    return (out, lse) if return_lse else out


def _attend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Stored,
    v_blocks: Stored,
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    options: _Options,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    tokens, rows = q.shape[0], block_tables.shape[0]
    blocks = (k_blocks, v_blocks, block_tables)
    single_pool = _make_pool(*blocks, _SINGLE_TILE_KV)
    if tokens <= rows:
        row, is_real = _row_of_token(tokens, cu_q_lens)
        token = jnp.arange(tokens, dtype=jnp.int32)
        kv_ends = kv_lens[row] - cu_q_lens[row + 1] + token + 1
        kv_ends = jnp.where(is_real, kv_ends, 0)
        out, lse = _single_queries(q, row, kv_ends, single_pool, options)
        return out.astype(q.dtype), lse

    # A tile may reach past the last token, and slices clamp instead: make room.
    tile_q = min(_TILE_Q, tokens)
    padded_q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    is_single = cu_q_lens[1:] - cu_q_lens[:-1] == 1
    out, lse = _single_queries(
        padded_q[cu_q_lens[:-1]],
        jnp.arange(rows, dtype=jnp.int32),
        jnp.where(is_single, kv_lens, 0),
        single_pool,
        options,
    )
    # Gathered, since a scatter into zeros, which all layers share, would copy them.
    row, is_real = _row_of_token(tokens + tile_q, cu_q_lens)
    is_single = (is_real & is_single[row])[:, None]
    result = (
        jnp.where(is_single[..., None], out[row], 0.0).astype(q.dtype),
        jnp.where(is_single, lse[row], -jnp.inf),
    )
    out, lse = _query_tiles(
        result,
        padded_q,
        tile_q,
        kv_lens,
        cu_q_lens,
        _make_pool(*blocks, _TILE_KV),
        options,
    )
    return out[:tokens], lse[:tokens]


def _row_of_token(
    tokens: int, cu_q_lens: Int32[Array, " offsets"]
) -> tuple[Int32[Array, " tokens"], Bool[Array, " tokens"]]:
    """Return the row of each token, and whether it is one; padding gets the last."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    return jnp.minimum(row, len(cu_q_lens) - 2), token < cu_q_lens[-1]


def _make_pool(k: Stored, v: Stored, block_tables: jax.Array, tile_kv: int) -> _Pool:
    """Cut the tables into tiles of about `tile_kv` keys."""
    width = block_tables.shape[1]
    blocks_per_tile = min(width, max(1, tile_kv // vector_shape(k)[2]))
    return _Pool(
        k=k,
        v=v,
        tables=jnp.pad(block_tables, ((0, 0), (0, -width % blocks_per_tile))),
        blocks_per_tile=blocks_per_tile,
    )


def _single_queries(
    q: Float[Array, "singles q_heads head_dim"],
    rows: Int32[Array, " singles"],
    kv_ends: Int32[Array, " singles"],
    pool: _Pool,
    options: _Options,
) -> tuple[Float[Array, "singles q_heads head_dim"], Float[Array, "singles q_heads"]]:
    """Attend from single queries, each to keys [0, kv_end) of its row.

    A kv_end of 0 costs nothing and gives output 0 and log-sum-exp -inf.
    """
    singles = kv_ends.shape[0]
    group = min(_GROUP, 4 * singles)
    tiles, num_whole, num_tiles = _list_tiles(kv_ends, rows, group, pool, options)
    grouped = _group_heads(q[:, None], pool)

    def one_group(index: jax.Array, softmax: _Softmax) -> _Softmax:
        single, ids, first, end = (
            lax.dynamic_slice_in_dim(array, index * group, group) for array in tiles
        )
        part = _attend_tiles(
            grouped[single],
            _Tiles(
                ids=ids,
                first=first[:, None],
                last=end[:, None] - 1,
                end=end,
                is_whole=(index + 1) * group <= num_whole,
            ),
            pool,
            options,
        )
        # Several tiles of one single may be in a group: each scatter folds them all.
        top = softmax.top.at[single].max(part.top)
        decay = jnp.exp(softmax.top - top)
        weight = jnp.exp(part.top - top[single])
        total = (softmax.total * decay).at[single].add(part.total * weight)
        acc = (
            (softmax.acc * decay[..., None])
            .at[single]
            .add(part.acc * weight[..., None])
        )
        return _Softmax(top=top, total=total, acc=acc)

    num_groups = (num_tiles + group - 1) // group
    softmax = lax.fori_loop(
        jnp.int32(0), num_groups, one_group, _empty_softmax(grouped)
    )
    out, lse = _finish(softmax, q.shape[1])
    return out[:, 0], lse[:, 0]


def _list_tiles(
    kv_ends: Int32[Array, " singles"],
    rows: Int32[Array, " singles"],
    group: int,
    pool: _Pool,
    options: _Options,
) -> tuple[_SingleTiles, Int32[Array, ""], Int32[Array, ""]]:
    """List the tiles of single queries: whole ones first, then the rows' last ones.

    Nothing in here depends on the layer, so that XLA does it once a step.

    Returns:
        The list, padded to a multiple of `group`; how many tiles are whole; and how
        many there are.
    """
    singles = kv_ends.shape[0]
    first_tile = _first_tile(kv_ends - 1, pool, options)
    last_tile = kv_ends // pool.tile_kv
    has_rest = kv_ends % pool.tile_kv > 0
    counts = jnp.concatenate([last_tile - first_tile, has_rest.astype(jnp.int32)])
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    length = singles * (pool.tables.shape[1] // pool.blocks_per_tile)
    item = jnp.arange(length + -length % group, dtype=jnp.int32)
    run = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    run = jnp.minimum(run, 2 * singles - 1)
    single = run % singles
    tile = jnp.where(
        run < singles,
        first_tile[single] + item - (ends - counts)[run],
        last_tile[single],
    )
    is_item = item < ends[-1]
    tile = jnp.where(is_item, tile, 0)
    start = tile * pool.tile_kv
    window = 0 if options.window is None else options.window
    tiles = _SingleTiles(
        single=single,
        ids=_block_ids(pool, rows[single], tile),
        first=jnp.where(window > 0, kv_ends[single] - window - start, 0),
        end=jnp.where(is_item, kv_ends[single] - start, 0),
    )
    return tiles, ends[singles - 1], ends[-1]


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
        out, lse = _attend_row(
            lax.dynamic_slice_in_dim(padded_q, start, tile_q)[None],
            (position + place)[None],
            jnp.minimum(kv_lens[row], position + tile_q),
            row,
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


def _attend_row(
    q: Float[Array, "1 queries q_heads head_dim"],
    positions: Int32[Array, "1 queries"],
    kv_end: Int32[Array, ""],
    row: Int32[Array, ""],
    pool: _Pool,
    options: _Options,
) -> tuple[
    Float[Array, "1 queries q_heads head_dim"], Float[Array, "1 queries q_heads"]
]:
    """Attend from queries of one row to its keys [0, kv_end)."""
    q_heads = q.shape[2]
    grouped = _group_heads(q, pool)
    last = jnp.repeat(positions, q_heads // pool.kv_heads, axis=1)
    first = jnp.zeros_like(last)
    if options.window is not None:
        first = last - options.window + 1

    def one_tile(index: jax.Array, softmax: _Softmax) -> _Softmax:
        start = index * pool.tile_kv
        tiles = _Tiles(
            ids=_block_ids(pool, row[None], index[None]),
            first=first - start,
            last=last - start,
            end=(kv_end - start)[None],
            is_whole=start + pool.tile_kv <= kv_end,
        )
        part = _attend_tiles(grouped, tiles, pool, options)
        top = jnp.maximum(softmax.top, part.top)
        decay, weight = jnp.exp(softmax.top - top), jnp.exp(part.top - top)
        return _Softmax(
            top=top,
            total=softmax.total * decay + part.total * weight,
            acc=softmax.acc * decay[..., None] + part.acc * weight[..., None],
        )

    softmax = lax.fori_loop(
        _first_tile(positions[0, 0], pool, options),
        (kv_end + pool.tile_kv - 1) // pool.tile_kv,
        one_tile,
        _empty_softmax(grouped),
    )
    return _finish(softmax, q_heads)


def _first_tile(
    position: Int32[Array, "*singles"], pool: _Pool, options: _Options
) -> Int32[Array, "*singles"]:
    """Return the first tile that a query at this position sees."""
    if options.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - options.window + 1, 0) // pool.tile_kv


def _group_heads(
    q: Float[Array, "members queries q_heads head_dim"], pool: _Pool
) -> Float[Array, "members kv_heads group_queries head_dim"]:
    """Put queries that share a KV head side by side."""
    members, queries, q_heads, head_dim = q.shape
    kv_heads = pool.kv_heads
    grouped = q.reshape(members, queries, kv_heads, q_heads // kv_heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(members, kv_heads, -1, head_dim)


def _empty_softmax(
    grouped: Float[Array, "members kv_heads queries head_dim"],
) -> _Softmax:
    return _Softmax(
        top=jnp.full(grouped.shape[:3], _LARGE_NEGATIVE, jnp.float32),
        total=jnp.zeros(grouped.shape[:3], jnp.float32),
        acc=jnp.zeros(grouped.shape, jnp.float32),
    )


def _finish(softmax: _Softmax, q_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return [members, queries, q_heads, head_dim] outputs, and log-sum-exps."""
    is_empty = softmax.total == 0.0
    safe_total = jnp.where(is_empty, 1.0, softmax.total)
    out = softmax.acc / safe_total[..., None]
    lse = jnp.where(is_empty, -jnp.inf, softmax.top + jnp.log(safe_total))
    members, kv_heads = softmax.top.shape[:2]
    group = q_heads // kv_heads

    def ungroup(x: jax.Array) -> jax.Array:
        tail = x.shape[3:]
        x = x.reshape(members, kv_heads, -1, group, *tail).swapaxes(1, 2)
        return x.reshape(members, -1, q_heads, *tail)

    return ungroup(out), ungroup(lse)


def _attend_tiles(
    q: Float[Array, "members kv_heads queries head_dim"],
    tiles: _Tiles,
    pool: _Pool,
    options: _Options,
) -> _Softmax:
    """Attend from each member's queries to its tile of keys."""
    k, v = (_operand(stored, q.dtype) for stored in _read_tiles(tiles, pool))
    key = jnp.arange(pool.tile_kv, dtype=jnp.int32)[None, None, :]
    last = jnp.minimum(tiles.last, tiles.end[:, None] - 1)
    visible = (key >= tiles.first[:, :, None]) & (key <= last[:, :, None])
    visible = visible[:, None]

    scores = _multiply("mhqd,mhtd->mhqt", q, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible, scores, _LARGE_NEGATIVE)
    top = jnp.max(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0.0)
    return _Softmax(
        top=top,
        total=jnp.sum(weights, axis=-1),
        acc=_multiply("mhqt,mhtd->mhqd", weights, v),
    )


def _operand(
    stored: Stored, q_dtype: jnp.dtype
) -> Float[Array, "members kv_heads tile_kv head_dim"]:
    """Return vectors as products take them: bfloat16 if queries are too, or float32."""
    if isinstance(stored, jax.Array) and stored.dtype == q_dtype == jnp.bfloat16:
        return stored
    return decode(stored)


def _multiply(equation: str, x: jax.Array, vectors: jax.Array) -> jax.Array:
    """Return products of a dtype's vectors in float32."""
    x = x.astype(vectors.dtype)
    return jnp.einsum(equation, x, vectors, preferred_element_type=jnp.float32)


def _block_ids(
    pool: _Pool, rows: Int32[Array, " members"], tiles: Int32[Array, " members"]
) -> Int32[Array, "members tile_blocks"]:
    place = jnp.arange(pool.blocks_per_tile, dtype=jnp.int32)[None, :]
    return pool.tables[rows[:, None], tiles[:, None] * pool.blocks_per_tile + place]


def _read_tiles(tiles: _Tiles, pool: _Pool) -> tuple[Stored, Stored]:
    """Read each member's keys and values: [members, kv_heads, tile_kv, head_dim].

    A (block, head) is contiguous in the pool, so it is gathered as one line; gathering
    blocks and swapping axes afterwards takes twice as long on CPU.

    Slots that hold nothing may hold NaN, and 0 * NaN is NaN; so values, of which sums
    are made, are zeros there.
    """
    members = tiles.end.shape[0]
    num_blocks, kv_heads, block_size, _ = vector_shape(pool.k)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    line = (tiles.ids[:, None, :] * kv_heads + head).reshape(-1)

    def gather(array: jax.Array) -> jax.Array:
        lines = array.reshape(num_blocks * kv_heads, -1)
        return lines.at[line].get(mode="promise_in_bounds")

    def fill(lines: jax.Array) -> jax.Array:
        slot = jnp.arange(pool.tile_kv, dtype=jnp.int32)[None, :]
        is_written = (slot < tiles.end[:, None]).reshape(members, 1, -1, block_size, 1)
        shape = (members, kv_heads, pool.blocks_per_tile, block_size, -1)
        zero = jnp.zeros((), lines.dtype)
        return jnp.where(is_written, lines.reshape(shape), zero).reshape(lines.shape)

    def whole() -> tuple[Stored, Stored]:
        return jax.tree.map(gather, (pool.k, pool.v))

    def partly_written() -> tuple[Stored, Stored]:
        k, v = whole()
        return k, jax.tree.map(fill, v)

    # In a branch of its own, a gather is not fused with what reads its result, and then
    # XLA compiles it to vector instructions: two to three times as fast on CPU.
    k, v = lax.platform_dependent(
        cpu=lambda: lax.cond(tiles.is_whole, whole, partly_written),
        default=partly_written,
    )

    def spread(lines: jax.Array, array: jax.Array) -> jax.Array:
        return lines.reshape(members, kv_heads, pool.tile_kv, *array.shape[3:])

    return jax.tree.map(spread, (k, v), (pool.k, pool.v))
