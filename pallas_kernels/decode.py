"""Paged attention of rows with few queries on Hopper: a Pallas Mosaic GPU kernel.

One program (a CTA) takes one query tile, one KV head and one *split* of the row's
keys, as in FlashDecoding (Dao et al., 2023); splits are merged by their log-sum-exps.
Inside, two warpgroups share a ring of 3 or 4 tiles of 64 keys:

- The *producer* walks the block table and starts one bulk copy per block, for K and
  for V, straight into shared memory.
- The *consumer* computes scores and outputs transposed, keys (and head_dim) along the
  64 rows that wgmma wants and the tile's lines along its columns, which may be as few
  as 8. So decoding one token wastes no rows of the tensor core:

      scores[keys, lines] = K[keys, head_dim] @ q[lines, head_dim].T
      out[head_dim, lines] += V[keys, head_dim].T @ weights[keys, lines]
"""

# Pallas' own classes and names confuse the type checker.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.merge import merge_partials
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
from pallas_kernels.operands import Operand, PerGroup, PerKeyInt8, Plain, operand_of
from pallas_kernels.ragged import pack, query_tiles, unpack

_NUM_SMS = 132  # H100 and H200
_SHARED_MEMORY_OF_AN_SM = 228 * 1024
# Lines of a tile, by head_dim: beyond, registers spill or shared memory is short.
_MAX_LINES = {64: 64, 128: 64, 192: 48, 256: 16}
# Of a value's scale, as far as the running maximum is concerned: weights before scaling
# stay far from what float32 holds.
_LEAST_LOG2 = -100.0
_MAX_LINES_OF_KEYS = {
    PerKeyInt8: {64: 64, 128: 48, 192: 48, 256: 16},
    PerGroup: {64: 64, 128: 32, 256: 16},
}


def choose_num_splits(
    num_programs: int, max_tiles: int, *, programs_per_sm: int
) -> int:
    """Choose into how many parts each row's keys are split.

    One, where the programs fill the multiprocessors without. Otherwise the smallest
    number that takes at most 15 % longer than the best: programs come in waves, and a
    wave takes as many tiles as a split has.

    Args:
        num_programs: Programs of one split: query tiles times KV heads.
        max_tiles: Tiles of the longest row that the block tables could hold.
        programs_per_sm: Programs that a multiprocessor runs at a time.
    """
    places = _NUM_SMS * programs_per_sm
    if num_programs >= places or max_tiles <= 1:
        return 1

    def duration(num_splits: int) -> int:
        waves = math.ceil(num_programs * num_splits / places)
        return waves * math.ceil(max_tiles / num_splits)

    candidates = range(1, min(max_tiles, places) + 1)
    longest = 1.15 * min(map(duration, candidates))
    return next(n for n in candidates if duration(n) <= longest)


def num_stages(keys: Operand, values: Operand) -> int:
    """Return how many tiles the ring holds: more of fewer bits."""
    return 3 if isinstance(keys, Plain) or isinstance(values, Plain) else 4


def programs_per_sm(keys: Operand, values: Operand, lines: int) -> int:
    """Return how many programs a multiprocessor runs at a time: two, if they fit."""
    is_plain = isinstance(keys, Plain) and isinstance(values, Plain)
    head_dim = keys.head_dim
    stage = TILE_KV * (keys.bytes_per_key + values.bytes_per_key)
    widened = 0 if values.tile() is None else 2 * TILE_KV * head_dim
    shared_memory = (
        num_stages(keys, values) * stage
        + widened
        + lines * (6 * head_dim + 2 * TILE_KV)  # queries, outputs, weights
        + 4096  # barriers, alignment
    )
    # Widened keys take registers: 128 for each of two programs' threads.
    most_lines = 32 if is_plain else {64: 16, 128: 8}.get(head_dim, 0)
    fits = 2 * shared_memory <= _SHARED_MEMORY_OF_AN_SM
    return 2 if fits and lines <= most_lines else 1


def max_lines(keys: Operand) -> int:
    """Return how many lines a tile may have."""
    return _MAX_LINES_OF_KEYS.get(type(keys), _MAX_LINES)[keys.head_dim]


def paged_decode(
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
    tokens_per_tile: int = 1,
    num_splits: int | None = None,
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
        tokens_per_tile: Tokens of a row that share a program; the row's keys are read
            once for all of them.
        num_splits: None: by `choose_num_splits`.
        interpret: `plgpu.InterpretGPUParams` to simulate the kernel on a CPU.

    Returns:
        The outputs in q's dtype and the float32 log-sum-exp of the scores; 0 and -inf
        for padding and where a query sees no key.

    Raises:
        NotImplementedError: See `check_supported`; or a tile would have too many lines.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, block_size = k.codes.shape[1:3]
    check_supported(q, block_size)
    keys, values = operand_of(k, q, "keys"), operand_of(v, q, "values")
    group = q_heads // kv_heads
    if tokens_per_tile * group > max_lines(keys):
        raise NotImplementedError(
            f"{tokens_per_tile} x {group} query heads for a KV head of head_dim "
            f"{head_dim} in decode: at most {max_lines(keys)}"
        )
    lines = -(-tokens_per_tile * group // 8) * 8  # a multiple of 8 for wgmma
    tiles = query_tiles(kv_lens, cu_q_lens, tokens, tokens_per_tile)
    packed = pack(
        q, tiles, kv_heads=kv_heads, tokens_per_tile=tokens_per_tile, lines=lines
    )
    num_tiles = packed.shape[0]
    asked = keys.asked(packed)
    if num_splits is None:
        max_tiles = -(-block_tables.shape[1] * block_size // TILE_KV)
        num_splits = choose_num_splits(
            num_tiles * kv_heads,
            max_tiles,
            programs_per_sm=programs_per_sm(keys, values, lines),
        )
    stages = num_stages(keys, values)
    options = {} if interpret is None else {"interpret": interpret}
    outs, lses = plgpu.kernel(
        functools.partial(
            _kernel,
            num_splits=num_splits,
            group=None if tokens_per_tile == 1 else group,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            keys=keys,
            values=values,
            registers=Registers(is_simulated=interpret is not None),
        ),
        out_type=(
            jax.ShapeDtypeStruct(
                (num_splits, num_tiles, kv_heads, head_dim, lines), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_splits, num_tiles, kv_heads, lines), jnp.float32),
        ),
        scratch_types={
            "ring": ring_scratch(
                keys.stages(stages),
                values.stages(stages),
                block_size=block_size,
            ),
            "q_smem": keys.queries(lines),
            "values_smem": values.tile(),
            "weights_smem": plgpu.SMEM(
                (lines, TILE_KV), values.dtype, transforms=SWIZZLED
            ),
            "out_smem": plgpu.SMEM((head_dim, lines), jnp.float32),
            "lse_smem": plgpu.SMEM((lines,), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=len(jax.tree.leaves(asked))),
        },
        grid=(num_splits, num_tiles, kv_heads),
        grid_names=("split", "tile", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(
        asked,
        keys.seen(k),
        values.seen(v),
        block_tables,
        tiles.row,
        tiles.position,
        tiles.kv_end,
    )
    out, lse = merge_partials(outs.swapaxes(-1, -2), lses)
    return unpack(
        out.astype(q.dtype),
        lse,
        tiles,
        cu_q_lens,
        q_shape=q.shape,
        tokens_per_tile=tokens_per_tile,
    )


def _kernel(
    q: Stored,
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
    q_smem: Stored,
    values_smem,
    weights_smem,
    out_smem,
    lse_smem,
    q_ready,
    num_splits: int,
    group: int | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    keys: Operand,
    values: Operand,
    registers: Registers,
):
    """One split of one query tile's keys, for one KV head; see the module's docstring.

    `group` is None where a tile has one token, whose position is the last key's.
    """
    split, tile = lax.axis_index("split"), lax.axis_index("tile")
    kv_head = lax.axis_index("kv_head")
    position, kv_end = positions_ref[tile], kv_ends_ref[tile]
    kv_begin = jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)
    first = kv_begin // TILE_KV
    num_tiles = (kv_end + TILE_KV - 1) // TILE_KV - first
    per_split = (num_tiles + num_splits - 1) // num_splits
    first += split * per_split
    num_tiles = jnp.clip(num_tiles - split * per_split, 0, per_split)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _produce():
        for source, target in zip(
            jax.tree.leaves(q.at((tile, kv_head))), jax.tree.leaves(q_smem), strict=True
        ):
            plgpu.copy_gmem_to_smem(source, target, q_ready)
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

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _consume():
        head_dim, lines = out_smem.shape
        shape = (TILE_KV, lines)
        stages = ring.k.codes.shape[0]
        # Lines past the row's end are clamped: they see no slot that holds nothing.
        last_visible = kv_end - 1
        if group is not None:
            token = registers.iota(shape, 1) // group
            last_visible = jnp.minimum(position + token, last_visible)
        plgpu.barrier_wait(q_ready)

        def one_tile(index, carry):
            top, total, acc = carry
            stage = index % stages
            key = (first + index) * TILE_KV
            plgpu.barrier_wait(ring.k_ready.at[stage])
            products = keys.products(ring.k.at(stage), q_smem, registers)
            scores = in_log2(products, scale, soft_cap)
            key_index = key + registers.iota(shape, 0)
            visible = key_index <= last_visible
            if window is not None:
                visible &= key_index > last_visible - window
            scores = jnp.where(visible, scores, -jnp.inf)
            factors = values.factors(ring.v.at(stage), kv_end - key, registers)
            new_top = jnp.maximum(top, _highest(scores, factors))
            decay = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - _along_lines(new_top, shape))
            total = total * _along_lines(decay, total.shape) + weights
            acc = acc * _along_lines(decay, acc.shape)
            weights = _weighted(weights, factors)
            registers.store_transposed(weights_smem, weights.astype(values.dtype))
            wait_for_values(ring, stage, key=key, kv_end=kv_end)
            operand = values.values(
                ring.v.at(stage), values_smem, kv_end - key, registers
            )
            plgpu.commit_smem()
            acc = registers.add_product(acc, operand.T, weights_smem.T)
            plgpu.barrier_arrive(ring.free.at[stage])
            return new_top, total, acc

        top, total, acc = lax.fori_loop(
            0,
            num_tiles,
            one_tile,
            (
                registers.full_reduced(lines, LOWEST, axis=0),
                registers.full(shape, 0.0),
                registers.full((head_dim, lines), 0.0),
            ),
        )
        total = total.sum(axis=0)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        out_smem[...] = acc * _along_lines(inverse, acc.shape)
        lse_smem[...] = (top + jnp.log2(total)) / LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[split, tile, kv_head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, tile, kv_head])
        plgpu.wait_smem_to_gmem(0)


def _highest(scores, factors):
    """Return each line's top score, raised so that no weight times factor exceeds 1.

    So that they may be 16-bit floats whatever the size of the values is.
    """
    if factors is None:
        return scores.max(axis=0)
    logs = jnp.maximum(jnp.log2(factors), _LEAST_LOG2)
    return (scores + lax.broadcast_in_dim(logs, scores.shape, [0])).max(axis=0)


def _weighted(weights, factors):
    """Return the weights times each key's factor."""
    if factors is None:
        return weights
    return weights * lax.broadcast_in_dim(factors, weights.shape, [0])


def _along_lines(x, shape: tuple[int, ...]):
    """Repeat a value per line down the rows."""
    return lax.broadcast_in_dim(x, shape, [1])
