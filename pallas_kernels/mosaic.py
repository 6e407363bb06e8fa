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
LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)
"""The top score before any: a difference to it is never inf - inf."""
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
        zeroed: A barrier, completed when the last tile's unwritten values are zero.
    """

    k: Any
    v: Any
    k_ready: Any
    v_ready: Any
    free: Any
    zeroed: Any


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
    return Ring(
        k=stages,
        v=stages,
        k_ready=ready,
        v_ready=ready,
        free=free,
        zeroed=plgpu.Barrier(),
    )


def produce(
    ring: Ring,
    k_ref,
    v_ref,
    tables_ref,
    *,
    row,
    kv_head,
    kv_end,
    tiles,
    registers: "Registers",
):
    """Fill the ring with the tiles [first, first + num) of a row's keys and values.

    Values past `kv_end` become zero: slots that hold nothing may hold NaN, and 0 * NaN
    is NaN. Consumers call `wait_for_values`.

    Args:
        ring: Its consumers give every stage back.
        k_ref: [num_blocks, kv_heads, block_size, head_dim] in global memory.
        v_ref: Likewise.
        tables_ref: [rows, width] block tables in global memory.
        row: Whose keys.
        kv_head: Which head's.
        kv_end: Keys from here on are not needed; their blocks are not read.
        tiles: (first, num).
        registers: The producer's.
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
            # Long complete: so the waits below are for the last tiles'.
            plgpu.barrier_wait(ring.v_ready.at[stage])

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

    # Every completion of a barrier must be observed before the kernel ends.
    oldest = jnp.maximum(num_tiles - num_stages, 0)

    def observe_values(index, carry):
        plgpu.barrier_wait(ring.v_ready.at[index % num_stages])
        return carry

    lax.fori_loop(oldest, num_tiles, observe_values, ())

    @pl.when((num_tiles > 0) & ((first + num_tiles) * TILE_KV > kv_end))
    def _zero_unwritten_values():
        num_kept = kv_end - (first + num_tiles - 1) * TILE_KV
        _zero_from(ring.v.at[(num_tiles - 1) % num_stages], num_kept, registers)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.zeroed)

    def observe_free(index, carry):
        plgpu.barrier_wait(ring.free.at[index % num_stages])
        return carry

    lax.fori_loop(oldest, num_tiles, observe_free, ())


def wait_for_values(ring: Ring, stage, *, key, kv_end) -> None:
    """Wait until the values of the tile that begins at `key` may be read."""
    plgpu.barrier_wait(ring.v_ready.at[stage])

    @pl.when(key + TILE_KV > kv_end)
    def _wait_for_zeros():
        plgpu.barrier_wait(ring.zeroed)


def _zero_from(ref, num_kept, registers: "Registers") -> None:
    """Zero the rows of a tile of values from `num_kept` on."""
    keys, head_dim = ref.shape
    width = min(head_dim, 64)  # few registers at a time
    kept = registers.iota((keys, width), 0) < num_kept
    for column in range(0, head_dim, width):
        columns = ref.at[:, pl.ds(column, width)]
        read = columns[...]
        columns[...] = jnp.where(kept, read, jnp.zeros_like(read))


def in_log2(products, scale: float, soft_cap: float | None):
    """Return the scores of queries times keys, for a softmax in powers of 2.

    They are scale * products, or soft_cap * tanh of that over soft_cap. Not by tanh,
    which Hopper approximates to 11 bits.
    """
    if soft_cap is None:
        return products * (scale * LOG2_E)
    power = jnp.exp2(products * (2 * scale * LOG2_E / soft_cap))
    return (soft_cap * LOG2_E) - (2 * soft_cap * LOG2_E) / (power + 1.0)


class Registers:
    """Values in wgmma's register layout, and its products.

    In a simulation, which has neither, any layout and a plain product.
    """

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

    def product(self, shape: tuple[int, int], left, right):
        """Return left @ right as float32 registers; `right` is in shared memory."""
        if self.is_simulated:
            return _simulated_product(left, right)

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, left, right)
            return acc_ref[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

    def add_product(self, acc, left, right):
        """Return acc + left @ right, in the registers of `acc`."""
        if self.is_simulated:
            return acc + _simulated_product(left, right)

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, left, right)
            plgpu.wgmma_wait(0)

        return pl.run_state(multiply)(plgpu.ACC.init(acc))

    def _cast(self, x, layout):
        return x if self.is_simulated else plgpu.layout_cast(x, layout)


def _simulated_product(left, right):
    """Multiply as a thread would, because the race detector sees no wgmma's operands.

    The commit says that the reads are done, for the copies that overwrite a stage.
    """
    left, right = left[...], right[...]
    plgpu.commit_smem()
    return jnp.dot(left, right, preferred_element_type=jnp.float32)
