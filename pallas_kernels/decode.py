"""Paged attention of single queries on Hopper: a Pallas Mosaic GPU kernel.

One program (a CTA) takes one query token, one KV head and one *split* of the row's
keys, as in FlashDecoding (Dao et al., 2023); splits are merged by their log-sum-exps.
Inside, two warpgroups share a ring of `_NUM_STAGES` tiles of 64 keys:

- The *producer* walks the block table and starts one bulk copy per block, for K and
  for V, straight into shared memory.
- The *consumer* computes scores and outputs transposed, keys (and head_dim) along the
  64 rows that wgmma wants and the query heads of the group along its columns, which
  may be as few as 8. So decoding one token wastes no rows of the tensor core:

      scores[keys, group] = K[keys, head_dim] @ q[group, head_dim].T
      out[head_dim, group] += V[keys, head_dim].T @ weights[keys, group]
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

_NUM_STAGES = 3
_NUM_SMS = 132  # H100 and H200
_CTAS_PER_SM = 2  # by shared memory, at head_dim 128
# Query heads for a KV head, by head_dim: beyond, registers spill or memory is short.
_MAX_GROUP = {64: 64, 128: 64, 192: 32, 256: 16}
_LOG2_E = math.log2(math.e)


def choose_num_splits(num_programs: int, max_tiles: int) -> int:
    """Choose into how many parts each row's keys are split.

    One, where the programs fill the multiprocessors without. Otherwise the smallest
    number that takes at most 15 % longer than the best: programs come in waves, and a
    wave takes as many tiles as a split has.

    Args:
        num_programs: Programs of one split: queries times KV heads.
        max_tiles: Tiles of the longest row that the block tables could hold.
    """
    places = _NUM_SMS * _CTAS_PER_SM
    if num_programs >= places or max_tiles <= 1:
        return 1

    def duration(num_splits: int) -> int:
        waves = math.ceil(num_programs * num_splits / places)
        return waves * math.ceil(max_tiles / num_splits)

    candidates = range(1, min(max_tiles, places) + 1)
    longest = 1.15 * min(map(duration, candidates))
    return next(n for n in candidates if duration(n) <= longest)


def paged_decode(
    q: Float[Array, "singles q_heads head_dim"],
    k_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "rows width"],
    rows: Int32[Array, " singles"],
    kv_ends: Int32[Array, " singles"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "singles q_heads head_dim"], Float[Array, "singles q_heads"]]:
    """Attend from single queries, each to keys [0, kv_end) of its row.

    Args:
        q: One query token each; several may be of one row.
        k_blocks: One layer's keys.
        v_blocks: One layer's values.
        block_tables: Each row's blocks in order.
        rows: The row of each query.
        kv_ends: Keys each query attends to; 0 gives output 0 and log-sum-exp -inf.
        scale: Factor on the scores.
        window: Each query sees only its last `window` keys.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        num_splits: None: by `choose_num_splits`.
        interpret: `plgpu.InterpretGPUParams` to simulate the kernel on a CPU.

    Returns:
        The outputs in q's dtype and the float32 log-sum-exp of the scores.

    Raises:
        NotImplementedError: See `check_supported`; or too many query heads share a KV
            head.
    """
    check_supported(q, k_blocks)
    singles, q_heads, head_dim = q.shape
    kv_heads, block_size = k_blocks.shape[1:3]
    group = q_heads // kv_heads
    if group > _MAX_GROUP[head_dim]:
        raise NotImplementedError(
            f"{group} query heads for a KV head of head_dim {head_dim} in decode: at "
            f"most {_MAX_GROUP[head_dim]}"
        )
    columns = -(-group // 8) * 8  # a multiple of 8 for wgmma
    if num_splits is None:
        max_tiles = -(-block_tables.shape[1] * block_size // TILE_KV)
        num_splits = choose_num_splits(singles * kv_heads, max_tiles)
    grouped = q.reshape(singles, kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    options = {} if interpret is None else {"interpret": interpret}
    outs, lses = plgpu.kernel(
        functools.partial(
            _kernel,
            num_splits=num_splits,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            is_simulated=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct(
                (num_splits, singles, kv_heads, head_dim, columns), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_splits, singles, kv_heads, columns), jnp.float32),
        ),
        scratch_types={
            "ring": ring_scratch(_NUM_STAGES, k_blocks),
            "q_smem": plgpu.SMEM((columns, head_dim), q.dtype, transforms=SWIZZLED),
            "weights_smem": plgpu.SMEM(
                (columns, TILE_KV), q.dtype, transforms=SWIZZLED
            ),
            "out_smem": plgpu.SMEM((head_dim, columns), jnp.float32),
            "lse_smem": plgpu.SMEM((columns,), jnp.float32),
            "q_ready": plgpu.Barrier(),
        },
        grid=(num_splits, singles, kv_heads),
        grid_names=("split", "single", "kv_head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )(grouped, k_blocks, v_blocks, block_tables, rows, kv_ends)
    outs = outs.swapaxes(-1, -2)[:, :, :, :group]
    out, lse = merge_partials(outs, lses[:, :, :, :group])
    return out.astype(q.dtype).reshape(q.shape), lse.reshape(singles, q_heads)


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    rows_ref,
    kv_ends_ref,
    out_ref,
    lse_ref,
    *,
    ring: Ring,
    q_smem,
    weights_smem,
    out_smem,
    lse_smem,
    q_ready,
    num_splits: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    is_simulated: bool,
):
    """One split of one query's keys, for one KV head; see the module's docstring."""
    split, single = lax.axis_index("split"), lax.axis_index("single")
    kv_head = lax.axis_index("kv_head")
    kv_end = kv_ends_ref[single]
    kv_begin = jnp.int32(0) if window is None else jnp.maximum(kv_end - window, 0)
    first = kv_begin // TILE_KV
    num_tiles = (kv_end + TILE_KV - 1) // TILE_KV - first
    per_split = (num_tiles + num_splits - 1) // num_splits
    first += split * per_split
    num_tiles = jnp.clip(num_tiles - split * per_split, 0, per_split)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _produce():
        plgpu.copy_gmem_to_smem(q_ref.at[single, kv_head], q_smem, q_ready)
        produce(
            ring,
            k_ref,
            v_ref,
            tables_ref,
            row=rows_ref[single],
            kv_head=kv_head,
            kv_end=kv_end,
            tiles=(first, num_tiles),
        )

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _consume():
        head_dim, columns = out_smem.shape
        registers = Registers(is_simulated)
        plgpu.barrier_wait(q_ready)

        def one_tile(index, carry):
            top, total, acc = carry
            stage = index % _NUM_STAGES
            key = (first + index) * TILE_KV
            plgpu.barrier_wait(ring.k_ready.at[stage])
            scores = product((TILE_KV, columns), ring.k.at[stage], q_smem.T) * scale
            if soft_cap is not None:
                scores = capped(scores, soft_cap)
            key_index = key + registers.iota((TILE_KV, columns), 0)
            visible = key_index < kv_end
            if window is not None:
                visible &= key_index >= kv_begin
            scores = jnp.where(visible, scores * _LOG2_E, -jnp.inf)
            # A tile has at least one visible key, so the new top is finite.
            new_top = jnp.maximum(top, scores.max(axis=0))
            decay = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - _along_columns(new_top, scores.shape))
            total = total * _along_columns(decay, total.shape) + weights
            acc = acc * _along_columns(decay, acc.shape)
            registers.store_transposed(weights_smem, weights.astype(q_smem.dtype))
            plgpu.barrier_wait(ring.v_ready.at[stage])

            @pl.when(key + TILE_KV > kv_end)
            def _zero_unwritten_values():
                zero_from(ring.v.at[stage], kv_end - key, registers)

            plgpu.commit_smem()
            acc += product(acc.shape, ring.v.at[stage].T, weights_smem.T)
            plgpu.barrier_arrive(ring.free.at[stage])
            return new_top, total, acc

        top, total, acc = lax.fori_loop(
            0,
            num_tiles,
            one_tile,
            (
                registers.full_reduced(columns, -jnp.inf, axis=0),
                registers.full((TILE_KV, columns), 0.0),
                registers.full((head_dim, columns), 0.0),
            ),
        )
        total = total.sum(axis=0)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        out_smem[...] = acc * _along_columns(inverse, acc.shape)
        lse_smem[...] = (top + jnp.log2(total)) / _LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[split, single, kv_head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[split, single, kv_head])
        plgpu.wait_smem_to_gmem(0)


def _along_columns(x, shape: tuple[int, ...]):
    """Repeat a value per column down the rows."""
    return lax.broadcast_in_dim(x, shape, [1])
