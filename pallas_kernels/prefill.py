"""Ragged paged attention of rows with many queries: a Pallas Mosaic GPU kernel.

One program (a CTA) takes one query tile of 128 lines and one KV head: a producer
warpgroup brings the row's keys and values, 64 at a time, and two consumer warpgroups
attend from 64 lines each, with a running softmax (FlashAttention, Dao et al., 2022).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic import (
    LOG2_E,
    LOWEST,
    SWIZZLED,
    TILE_KV,
    Registers,
    Ring,
    Stored,
    check_supported,
    in_log2,
    produce,
    ring_scratch,
    wait_for_values,
)
from pallas_kernels.operands import Plain, operand_of
from pallas_kernels.ragged import pack, query_tiles, unpack

_NUM_CONSUMERS = 2
_LINES_PER_CONSUMER = 64  # the rows of a wgmma
_LINES = _NUM_CONSUMERS * _LINES_PER_CONSUMER
NUM_STAGES = {64: 3, 128: 3, 192: 3, 256: 2}  # by head_dim: what shared memory holds
# By the registers and the shared memory of a multiprocessor; together 3 * 168, what a
# program of three warpgroups starts with.
_PRODUCER_REGISTERS = 56
_CONSUMER_REGISTERS = 224


def paged_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Stored,
    v: Stored,
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
        k: One layer's keys.
        v: One layer's values.
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
        NotImplementedError: See `check_supported`; or more than 128 query heads share a
            KV head.
    """
    kv_heads, block_size = k.codes.shape[1:3]
    check_supported(q, block_size)
    operand = operand_of(k, q, "keys")
    if not (
        isinstance(operand, Plain) and isinstance(operand_of(v, q, "values"), Plain)
    ):
        raise NotImplementedError("a quantised cache: only in decode")
    tokens, q_heads, head_dim = q.shape
    group = q_heads // kv_heads
    if group > _LINES:
        raise NotImplementedError(
            f"{group} query heads for a KV head: at most {_LINES}"
        )
    tokens_per_tile = _LINES // group
    tiles = query_tiles(kv_lens, cu_q_lens, tokens, tokens_per_tile)
    packed = pack(
        q, tiles, kv_heads=kv_heads, tokens_per_tile=tokens_per_tile, lines=_LINES
    )
    num_tiles = packed.shape[0]
    options = {} if interpret is None else {"interpret": interpret}
    registers = Registers(is_simulated=interpret is not None)
    stages = operand.stages(NUM_STAGES[head_dim])
    consumed = (_NUM_CONSUMERS, _LINES_PER_CONSUMER)
    scratch = {
        "ring": ring_scratch(
            stages, stages, block_size=block_size, num_consumers=_NUM_CONSUMERS
        ),
        "q_smem": plgpu.SMEM((*consumed, head_dim), q.dtype, transforms=SWIZZLED),
        "lse_smem": plgpu.SMEM(consumed, jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
    }
    out, lse = plgpu.kernel(
        functools.partial(
            _kernel,
            group=group,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            values=operand,
            registers=registers,
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
        k,
        v,
        block_tables,
        tiles.row,
        tiles.position,
        tiles.kv_end,
    )

    return unpack(
        out,
        lse,
        tiles,
        cu_q_lens,
        q_shape=q.shape,
        tokens_per_tile=tokens_per_tile,
    )


def _kernel(
    q_ref,
    k: Stored,
    v: Stored,
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
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    values: Plain,
    registers: Registers,
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
            k,
            v,
            tables_ref,
            row=rows_ref[tile],
            kv_head=kv_head,
            kv_end=kv_end,
            tiles=(first, num_tiles),
            zero_from=functools.partial(values.zero_from, registers=registers),
        )

    @pl.when(warpgroup < _NUM_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        num_stages, _, head_dim = ring.k.codes.shape
        shape = (_LINES_PER_CONSUMER, TILE_KV)
        line = warpgroup * _LINES_PER_CONSUMER + registers.iota(shape, 0)
        # Counted from the first tile. Lines past the row's end are clamped: they see no
        # slot that holds nothing.
        end = kv_end - first * TILE_KV
        query_position = position - first * TILE_KV + line // group
        query_position = jnp.minimum(query_position, end - 1)
        plgpu.barrier_wait(q_ready)

        def one_tile(index, carry):
            top, total, acc = carry
            stage = index % num_stages
            key = index * TILE_KV
            plgpu.barrier_wait(ring.k_ready.at[stage])
            products = registers.product(
                shape, q_smem.at[warpgroup], ring.k.codes.at[stage].T
            )
            scores = in_log2(products, scale, soft_cap)
            column = registers.iota(shape, 1)
            ahead = query_position - key  # the last column that is not ahead
            scores = jnp.where(column <= ahead, scores, -jnp.inf)
            if window is not None:
                scores = jnp.where(column > ahead - window, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=1))
            decay = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - _along_lines(new_top, shape))
            total = total * decay + weights.sum(axis=1)
            acc = acc * _along_lines(decay, acc.shape)
            weights = weights.astype(q_smem.dtype)
            wait_for_values(ring, stage, key=key, kv_end=end)
            acc = registers.add_product(acc, weights, ring.v.codes.at[stage])
            plgpu.barrier_arrive(ring.free.at[stage])
            return new_top, total, acc

        top, total, acc = lax.fori_loop(
            jnp.int32(0),
            num_tiles,
            one_tile,
            (
                registers.full_reduced(_LINES_PER_CONSUMER, LOWEST, axis=1),
                registers.full_reduced(_LINES_PER_CONSUMER, 0.0, axis=1),
                registers.full((_LINES_PER_CONSUMER, head_dim), 0.0),
            ),
        )
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        out = acc * _along_lines(inverse, acc.shape)
        # Nobody reads the queries any more: the outputs take their place.
        q_smem[warpgroup] = out.astype(q_smem.dtype)
        lse_smem[warpgroup] = (top + jnp.log2(total)) / LOG2_E
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
