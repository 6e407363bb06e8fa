"""What the Mosaic GPU kernels have in common: the ring of tiles, and registers.

Keys and values come in tiles of `TILE_KV` keys through a *ring* of stages in shared
memory. A producer warpgroup fills stages and consumer warpgroups give them back.
"""

# Pallas' own classes and names confuse the type checker.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_KV = 64
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""How 16-bit operands of wgmma lie in shared memory."""


def check_supported(q: jax.Array, k_blocks: jax.Array) -> None:
    """Check that the kernels can do such a case.

    Raises:
        NotImplementedError: They cannot; the message names what.
    """
    block_size, head_dim = k_blocks.shape[2:]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries of {q.dtype}: only bfloat16 and float16")
    if k_blocks.dtype != q.dtype:
        raise NotImplementedError(
            f"a cache of {k_blocks.dtype} with queries of {q.dtype}"
        )
    if head_dim not in (64, 128, 192, 256):
        raise NotImplementedError(f"head_dim {head_dim}: only 64, 128, 192 and 256")
    if block_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(
            f"block_size {block_size}: only 8, 16, 32, 64 and 128"
        )


class Ring(NamedTuple):
    """The stages of keys and values, and who may touch them.

    Attributes:
        k: [num_stages, TILE_KV, head_dim] in shared memory.
        v: Likewise.
        k_ready: A barrier a stage, completed when its keys have arrived.
        v_ready: Likewise.
        free: A barrier a stage, completed when every consumer has given it back.
    """

    k: Any
    v: Any
    k_ready: Any
    v_ready: Any
    free: Any


def ring_scratch(
    num_stages: int, k_blocks: jax.Array, *, num_consumers: int = 1
) -> Ring:
    """Return the scratch types of a ring for such a pool."""
    block_size, head_dim = k_blocks.shape[2:]
    stages = plgpu.SMEM(
        (num_stages, TILE_KV, head_dim), k_blocks.dtype, transforms=SWIZZLED
    )
    copies = TILE_KV // min(block_size, TILE_KV)
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages)
    return Ring(k=stages, v=stages, k_ready=ready, v_ready=ready, free=free)


def produce(ring: Ring, k_ref, v_ref, tables_ref, *, row, kv_head, kv_end, tiles):
    """Fill the ring with the tiles [first, first + num) of a row's keys and values.

    Args:
        ring: Its consumers give every stage back.
        k_ref: [num_blocks, kv_heads, block_size, head_dim] in global memory.
        v_ref: Likewise.
        tables_ref: [rows, width] block tables in global memory.
        row: Whose keys.
        kv_head: Which head's.
        kv_end: Keys from here on are not needed; their blocks are not read.
        tiles: (first, num).
    """
    first, num_tiles = tiles
    num_stages = ring.k.shape[0]
    block_size = k_ref.shape[2]
    piece = min(block_size, TILE_KV)
    last_block = jnp.maximum(kv_end - 1, 0) // block_size

    def one_tile(index, carry):
        stage = index % num_stages

        @pl.when(index >= num_stages)
        def _wait_until_free():
            plgpu.barrier_wait(ring.free.at[stage])

        # Past the end the last block comes again: barriers count on every copy.
        key = (first + index) * TILE_KV
        sources = []
        for offset in range(0, TILE_KV, piece):
            block = jnp.minimum((key + offset) // block_size, last_block)
            inside = (key + offset) % block_size if piece < block_size else 0
            sources.append((tables_ref[row, block], pl.ds(inside, piece), offset))
        for pool, stages, ready in (
            (k_ref, ring.k, ring.k_ready),
            (v_ref, ring.v, ring.v_ready),
        ):
            for block_id, keys, offset in sources:
                plgpu.copy_gmem_to_smem(
                    pool.at[block_id, kv_head, keys],
                    stages.at[stage, pl.ds(offset, piece)],
                    ready.at[stage],
                )
        return carry

    lax.fori_loop(jnp.int32(0), num_tiles, one_tile, ())

    def observe(index, carry):
        plgpu.barrier_wait(ring.free.at[index % num_stages])
        return carry

    # Every completion of a barrier must be observed before the kernel ends.
    lax.fori_loop(jnp.maximum(num_tiles - num_stages, 0), num_tiles, observe, ())


def zero_from(ref, num_kept, registers: "Registers") -> None:
    """Zero the rows of a tile of values from `num_kept` on.

    Slots that hold nothing may hold NaN, and 0 * NaN is NaN. Commit afterwards.
    """
    read = ref[...]
    kept = registers.iota(ref.shape, 0) < num_kept
    ref[...] = jnp.where(kept, read, jnp.zeros_like(read))


def product(shape: tuple[int, int], left, right):
    """Return left @ right as float32 registers; `right` is in shared memory."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, left, right)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def capped(scores, soft_cap: float):
    """Return soft_cap * tanh(scores / soft_cap).

    Not by tanh, which Hopper approximates to 11 bits.
    """
    power = jnp.exp2(scores * (2 * math.log2(math.e) / soft_cap))
    return soft_cap * (1.0 - 2.0 / (power + 1.0))


class Registers:
    """Values in wgmma's register layout; in a simulation, which has none, in any."""

    def __init__(self, is_simulated: bool):
        self.is_simulated = is_simulated

    def full(self, shape: tuple[int, int], value: float):
        """Return float32 registers of one value."""
        return self._cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)

    def full_reduced(self, size: int, value: float, *, axis: int):
        """Return what a reduction of a matrix over `axis` gives, of one value."""
        layout = plgpu.Layout.WGMMA.reduce(axis)
        return self._cast(jnp.full((size,), value, jnp.float32), layout)

    def iota(self, shape: tuple[int, int], dimension: int):
        """Return the int32 index along a dimension."""
        if self.is_simulated:
            return lax.broadcasted_iota(jnp.int32, shape, dimension)
        return plgpu.broadcasted_iota(
            jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA
        )

    def store_transposed(self, ref, x) -> None:
        """Store x.T: wgmma wants the long side of its right operand contiguous."""
        if self.is_simulated:
            ref[...] = x.T
        else:
            ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def _cast(self, x, layout):
        return x if self.is_simulated else plgpu.layout_cast(x, layout)
