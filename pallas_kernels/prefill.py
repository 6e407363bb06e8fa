"""Ragged paged attention of rows with many queries: a Pallas Mosaic GPU kernel.

Queries are packed, before the kernel, into *query tiles* of 128 lines: the query heads
that share a KV head, of as many consecutive tokens of one row as fit. A tile never
holds two rows, so all of it reads the same keys, and every copy is dense whatever the
rows' lengths. One program (a CTA) takes one query tile and one KV head: a producer
warpgroup brings the row's keys and values, 64 at a time, and two consumer warpgroups
attend from 64 lines each, with a running softmax (FlashAttention, Dao et al., 2022).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import (
    SWIZZLED,
    TILE_KV,
    Registers,
    Ring,
    capped,
    check_supported,
    produce,
    product,
    ring_scratch,
    zero_from,
)
from pallas_kernels.ragged import row_of_token

_NUM_CONSUMERS = 2
_LINES_PER_CONSUMER = 64  # the rows of a wgmma
_LINES = _NUM_CONSUMERS * _LINES_PER_CONSUMER
_NUM_STAGES = 3
_MAX_HEAD_DIM = 128  # beyond, the accumulator and a product's result do not fit
# A multiprocessor has 512 for each of a warpgroup's 128 threads.
_PRODUCER_REGISTERS = 64
_CONSUMER_REGISTERS = 208
_LOG2_E = math.log2(math.e)


class _QueryTiles(NamedTuple):
    """Which tokens each query tile holds; a tile of none has kv_end 0.

    Attributes:
        row: The row of the tile.
        token: Its first token.
        position: That token's position in its row.
        kv_end: The position after its last token's.
        first_of_row: [rows], each row's first tile.
    """

    row: jax.Array
    token: jax.Array
    position: jax.Array
    kv_end: jax.Array
    first_of_row: jax.Array


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " offsets"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Attend from each token to its row's keys at or before its own position.

    Args:
        q: Queries, the rows' one after another, padding last.
        k_blocks: One layer's keys.
        v_blocks: One layer's values.
        block_tables: Each row's blocks in order.
        kv_lens: Tokens each row attends to; at least its queries.
        cu_q_lens: Offsets of the rows' queries.
        scale: Factor on the scores.
        window: Each query sees only its last `window` keys, its own included.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        interpret: `plgpu.InterpretGPUParams` to simulate the kernel on a CPU.

    Returns:
        The outputs in q's dtype and the float32 log-sum-exp of the scores; 0 and -inf
        for padding.

    Raises:
        NotImplementedError: See `check_supported`; or head_dim is above 128, or more
            than 128 query heads share a KV head.
    """
    check_supported(q, k_blocks)
    tokens, q_heads, head_dim = q.shape
    kv_heads = k_blocks.shape[1]
    group = q_heads // kv_heads
    if head_dim > _MAX_HEAD_DIM:
        raise NotImplementedError(f"head_dim {head_dim} in prefill: at most 128")
    if group > _LINES:
        raise NotImplementedError(
            f"{group} query heads for a KV head: at most {_LINES}"
        )
    tokens_per_tile = _LINES // group
    tiles = _query_tiles(kv_lens, cu_q_lens, tokens, tokens_per_tile)
    # Line i of a tile is head i % group of its token i // group.
    line = jnp.arange(_LINES, dtype=jnp.int32)
    token = jnp.minimum(tiles.token[:, None] + (line // group)[None], tokens - 1)
    grouped = q.reshape(tokens, kv_heads, group, head_dim)
    packed = grouped[token, :, (line % group)[None]].swapaxes(1, 2)

    num_tiles = packed.shape[0]
    options = {} if interpret is None else {"interpret": interpret}
    consumed = (_NUM_CONSUMERS, _LINES_PER_CONSUMER)
    scratch = {
        "ring": ring_scratch(_NUM_STAGES, k_blocks, num_consumers=_NUM_CONSUMERS),
        "q_smem": plgpu.SMEM((*consumed, head_dim), q.dtype, transforms=SWIZZLED),
        "lse_smem": plgpu.SMEM(consumed, jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
        "values_zeroed": plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
    }
    if interpret is not None:  # which takes left operands from shared memory only
        scratch["weights_smem"] = plgpu.SMEM((*consumed, TILE_KV), q.dtype)
    out, lse = plgpu.kernel(
        functools.partial(
            _kernel,
            group=group,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ),
        out_type=(
            jax.ShapeDtypeStruct((num_tiles, kv_heads, _LINES, head_dim), q.dtype),
            jax.ShapeDtypeStruct((num_tiles, kv_heads, _LINES), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(num_tiles, kv_heads),
        grid_names=("tile", "kv_head"),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(
        packed,
        k_blocks,
        v_blocks,
        block_tables,
        tiles.row,
        tiles.position,
        tiles.kv_end,
    )

    row, is_real = row_of_token(tokens, cu_q_lens)
    offset = jnp.arange(tokens, dtype=jnp.int32) - cu_q_lens[row]
    tile = jnp.clip(
        tiles.first_of_row[row] + offset // tokens_per_tile, 0, num_tiles - 1
    )
    line = (offset % tokens_per_tile)[:, None] * group + jnp.arange(group)[None]
    place = (tile[:, None], slice(None), line)
    is_real = is_real[:, None]
    out, lse = (x[place].swapaxes(1, 2) for x in (out, lse))  # [tokens, kv_heads, ...]
    return (
        jnp.where(is_real[..., None], out.reshape(q.shape), jnp.zeros((), q.dtype)),
        jnp.where(is_real, lse.reshape(tokens, q_heads), -jnp.inf),
    )


def _query_tiles(
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " offsets"],
    tokens: int,
    tokens_per_tile: int,
) -> _QueryTiles:
    """Cut each row's queries into tiles; there are as many as there could be."""
    rows = len(kv_lens)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    ends = jnp.cumsum((q_lens + tokens_per_tile - 1) // tokens_per_tile)
    ends = ends.astype(jnp.int32)
    first_of_row = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile = jnp.arange(tokens // tokens_per_tile + rows, dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    is_real = row < rows
    row = jnp.minimum(row, rows - 1)
    offset = (tile - first_of_row[row]) * tokens_per_tile
    position = kv_lens[row] - q_lens[row] + offset
    kv_end = jnp.minimum(position + tokens_per_tile, kv_lens[row])
    return _QueryTiles(
        row=row,
        token=jnp.where(is_real, cu_q_lens[row] + offset, 0),
        position=position,
        kv_end=jnp.where(is_real, kv_end, 0),
        first_of_row=first_of_row,
    )


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    rows_ref,
    positions_ref,
    kv_ends_ref,
    out_ref,
    lse_ref,
    *,
    ring: Ring,
    q_smem,
    lse_smem,
    q_ready,
    values_zeroed,
    weights_smem=None,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
):
    """One query tile and one KV head; see the module's docstring."""
    tile, kv_head = lax.axis_index("tile"), lax.axis_index("kv_head")
    warpgroup = lax.axis_index("warpgroup")
    position, kv_end = positions_ref[tile], kv_ends_ref[tile]
    if window is None:
        first = jnp.int32(0)
    else:
        first = jnp.maximum(position - window + 1, 0) // TILE_KV
    num_tiles = jnp.maximum((kv_end + TILE_KV - 1) // TILE_KV - first, 0)

    @pl.when(warpgroup == _NUM_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        for consumer in range(_NUM_CONSUMERS):
            lines = pl.ds(consumer * _LINES_PER_CONSUMER, _LINES_PER_CONSUMER)
            plgpu.copy_gmem_to_smem(
                q_ref.at[tile, kv_head, lines], q_smem.at[consumer], q_ready
            )
        produce(
            ring,
            k_ref,
            v_ref,
            tables_ref,
            row=rows_ref[tile],
            kv_head=kv_head,
            kv_end=kv_end,
            tiles=(first, num_tiles),
        )

    @pl.when(warpgroup < _NUM_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        registers = Registers(weights_smem is not None)
        num_stages, _, head_dim = ring.k.shape
        shape = (_LINES_PER_CONSUMER, TILE_KV)
        line = warpgroup * _LINES_PER_CONSUMER + registers.iota(shape, 0)
        query_position = position + line // group
        plgpu.barrier_wait(q_ready)

        def one_tile(index, carry):
            top, total, acc = carry
            stage = index % num_stages
            key = (first + index) * TILE_KV
            plgpu.barrier_wait(ring.k_ready.at[stage])
            scores = product(shape, q_smem.at[warpgroup], ring.k.at[stage].T) * scale
            if soft_cap is not None:
                scores = capped(scores, soft_cap)
            key_index = key + registers.iota(shape, 1)
            visible = (key_index <= query_position) & (key_index < kv_end)
            if window is not None:
                visible &= key_index > query_position - window
            scores = jnp.where(visible, scores * _LOG2_E, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=1))
            # Behind a window a line may have seen no key yet.
            shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            decay = jnp.exp2(top - shift)
            weights = jnp.exp2(scores - _along_lines(shift, shape))
            total = total * decay + weights.sum(axis=1)
            acc = acc * _along_lines(decay, acc.shape)
            weights = weights.astype(q_smem.dtype)
            if weights_smem is not None:
                weights_smem[warpgroup] = weights
                plgpu.commit_smem()
                weights = weights_smem.at[warpgroup]
            plgpu.barrier_wait(ring.v_ready.at[stage])

            @pl.when(key + TILE_KV > kv_end)
            def _zero_unwritten_values():  # in the last tile, once
                @pl.when(warpgroup == 0)
                def _zero():
                    zero_from(ring.v.at[stage], kv_end - key, registers)
                    plgpu.commit_smem()

                plgpu.barrier_arrive(values_zeroed)
                plgpu.barrier_wait(values_zeroed)

            acc += product(acc.shape, weights, ring.v.at[stage])
            plgpu.barrier_arrive(ring.free.at[stage])
            return new_top, total, acc

        top, total, acc = lax.fori_loop(
            jnp.int32(0),
            num_tiles,
            one_tile,
            (
                registers.full_reduced(_LINES_PER_CONSUMER, -jnp.inf, axis=1),
                registers.full_reduced(_LINES_PER_CONSUMER, 0.0, axis=1),
                registers.full((_LINES_PER_CONSUMER, head_dim), 0.0),
            ),
        )
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        out = acc * _along_lines(inverse, acc.shape)
        # Nobody reads the queries any more: the outputs take their place.
        q_smem[warpgroup] = out.astype(q_smem.dtype)
        lse_smem[warpgroup] = (top + jnp.log2(total)) / _LOG2_E
        plgpu.commit_smem()
        lines = pl.ds(warpgroup * _LINES_PER_CONSUMER, _LINES_PER_CONSUMER)
        plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], out_ref.at[tile, kv_head, lines])
        plgpu.copy_smem_to_gmem(
            lse_smem.at[warpgroup], lse_ref.at[tile, kv_head, lines]
        )
        plgpu.wait_smem_to_gmem(0)


def _along_lines(x, shape: tuple[int, ...]):
    """Repeat a value per line along the row."""
    return lax.broadcast_in_dim(x, shape, [0])
