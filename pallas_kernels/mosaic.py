"""What the Mosaic GPU kernels have in common: the ring of tiles, and registers.

Keys and values come in tiles of `TILE_KV` keys through a *ring* of stages in shared
memory. A producer warpgroup fills stages and consumer warpgroups give them back.
"""

# Pallas' own classes and names confuse the type checker.
# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false

import math
from collections.abc import Callable
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


def swizzled(row_bytes: int, bits: int) -> tuple[Any, ...]:
    """Return how rows of so many bytes lie in shared memory, for wgmma and for copies.

    Args:
        row_bytes: A multiple of 32.
        bits: Of an element.
    """
    swizzle = next(n for n in (128, 64, 32) if row_bytes % n == 0)
    return (
        plgpu.TilingTransform((8, swizzle * 8 // bits)),
        plgpu.SwizzleTransform(swizzle),
    )


SWIZZLED = swizzled(128, 16)
"""How 16-bit operands of wgmma lie in shared memory."""


def check_supported(q: jax.Array, block_size: int) -> None:
    """Check that the kernels can do such queries and blocks.

    Raises:
        NotImplementedError: They cannot; the message names what.
    """
    head_dim = q.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries of {q.dtype}: only bfloat16 and float16")
    if head_dim not in (64, 128, 192, 256):
        raise NotImplementedError(f"head_dim {head_dim}: only 64, 128, 192 and 256")
    if block_size not in (8, 16, 32, 64, 128):
        raise NotImplementedError(
            f"block_size {block_size}: only 8, 16, 32, 64 and 128"
        )


class Stored(NamedTuple):
    """Keys or values as the cache holds them: in a pool, in the ring or in a stage.

    Attributes:
        codes: [..., keys, n]; of a plain cache the vectors themselves.
        scales: What codes are multiplied by, [..., keys] or [..., keys, groups]; None
            if there are none.
    """

    codes: Any
    scales: Any = None

    def at(self, stage) -> "Stored":
        """Return one stage of a ring."""
        scales = None if self.scales is None else self.scales.at[stage]
        return Stored(self.codes.at[stage], scales)


class Ring(NamedTuple):
    """The stages of keys and values, and who may touch them.

    Attributes:
        k: `Stored` in shared memory, codes [num_stages, TILE_KV, n].
        v: Likewise.
        k_ready: A barrier a stage, completed when its keys have arrived, and the scales
            of keys and values.
        v_ready: A barrier a stage, completed when its values' codes have arrived.
        free: A barrier a stage, completed when every consumer has given it back.
        zeroed: A barrier, completed when the last tile's unwritten values are zero.
    """

    k: Stored
    v: Stored
    k_ready: Any
    v_ready: Any
    free: Any
    zeroed: Any


def ring_scratch(
    k: Stored, v: Stored, *, block_size: int, num_consumers: int = 1
) -> Ring:
    """Return the scratch types of a ring whose stages are `k` and `v`."""
    num_stages = k.codes.shape[0]
    pieces = TILE_KV // min(block_size, TILE_KV)
    with_keys = 1 + sum(side.scales is not None for side in (k, v))

    def barriers(num_arrivals):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages)

    return Ring(
        k=k,
        v=v,
        k_ready=barriers(pieces * with_keys),
        v_ready=barriers(pieces),
        free=barriers(num_consumers),
        zeroed=plgpu.Barrier(),
    )


def produce(
    ring: Ring,
    k: Stored,
    v: Stored,
    tables_ref,
    *,
    row,
    kv_head,
    kv_end,
    tiles,
    zero_from: Callable[[Stored, Any], None],
):
    """Fill the ring with the tiles [first, first + num) of a row's keys and values.

    Values past `kv_end` become zero: slots that hold nothing may hold NaN, and 0 * NaN
    is NaN. Consumers call `wait_for_values`.

    Args:
        ring: Its consumers give every stage back.
        k: The pool in global memory, codes [num_blocks, kv_heads, block_size, n].
        v: Likewise.
        tables_ref: [rows, width] block tables in global memory.
        row: Whose keys.
        kv_head: Which head's.
        kv_end: Keys from here on are not needed; their blocks are not read.
        tiles: (first, num).
        zero_from: Makes a stage of values harmless from a key on.
    """
    first, num_tiles = tiles
    num_stages = ring.k.codes.shape[0]
    block_size = k.codes.shape[2]
    piece = min(block_size, TILE_KV)
    last_block = jnp.maximum(kv_end - 1, 0) // block_size
    copied = [
        (k.codes, ring.k.codes, ring.k_ready),
        (k.scales, ring.k.scales, ring.k_ready),
        (v.scales, ring.v.scales, ring.k_ready),
        (v.codes, ring.v.codes, ring.v_ready),
    ]

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
            sources.append((tables_ref[row, block], inside, offset))
        for pool, stages, ready in copied:
            if pool is None:
                continue
            width = pool.shape[2] // block_size  # groups of scales lie side by side
            for block_id, inside, offset in sources:
                plgpu.copy_gmem_to_smem(
                    pool.at[block_id, kv_head, pl.ds(inside * width, piece * width)],
                    stages.at[stage, pl.ds(offset * width, piece * width)],
                    ready.at[stage],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
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
        zero_from(ring.v.at((num_tiles - 1) % num_stages), num_kept)
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

    def load_narrow(self, ref, dtype):
        """Return numbers of 8 or 4 bits in shared memory as 16-bit ones."""
        if self.is_simulated:
            return ref[...].astype(dtype)
        layout = (
            plgpu.Layout.WGMMA_UPCAST_4X
            if ref.dtype == jnp.int4
            else plgpu.Layout.WGMMA_8BIT
        )
        return plgpu.load(ref, layout=layout).astype(dtype)

    def load_left(self, ref, dtype):
        """Return such numbers as a left operand of wgmma."""
        if self.is_simulated:
            return ref[...].astype(dtype)
        words = self._load_words(ref)
        if ref.dtype == jnp.int4:
            words = plgpu.layout_cast(words, plgpu.Layout.WGMMA_UPCAST_2X)
        return plgpu.layout_cast(words, plgpu.Layout.WGMMA).astype(dtype)

    def _load_words(self, ref):
        """Load 32 bits at a time: 4 or 8 neighbours of a row."""
        is_int4 = ref.dtype == jnp.int4
        layout = (
            plgpu.Layout.WGMMA_UPCAST_4X if is_int4 else plgpu.Layout.WGMMA_UPCAST_2X
        )
        return plgpu.load(ref, layout=layout)

    def load_per_row(self, ref):
        """Return a number per row of a matrix from shared memory."""
        if self.is_simulated:
            return ref[...]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))

    def load_per_column(self, ref):
        """Return a number per column of a matrix from shared memory."""
        if self.is_simulated:
            return ref[...]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))

    def load_columns(self, ref, columns: int):
        """Return the columns of a matrix [rows, columns] of bfloat16, as float32.

        Args:
            ref: [rows * columns] in shared memory.
            columns: 2, 4 or 8: a row is loaded at once.
        """
        shape = (ref.shape[0] // columns, columns)
        if self.is_simulated:
            loaded = ref[...].reshape(shape).astype(jnp.float32)
            return [loaded[:, column] for column in range(columns)]
        # Rows lie where wgmma's layout has them.
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((64, columns), (16, columns), (8, columns))),
            (-6,),  # over the warps
            (-2, plgpu.Replicated(4)),  # over a warp's threads
            -1,  # a thread's vector
        )
        loaded = plgpu.load(ref.reshape(*shape), layout=layout, optimized=False)
        bits = lax.bitcast_convert_type(loaded, jnp.int16).astype(jnp.int32)
        index = plgpu.broadcasted_iota(jnp.int32, bits.shape, 1, layout=layout)
        # A sum of one number and zeros, which the compiler leaves out.
        picked = [
            jnp.where(index == column, bits, 0).sum(axis=1) for column in range(columns)
        ]
        return [lax.bitcast_convert_type(x << 16, jnp.float32) for x in picked]

    def iota_of_rows(self, rows: int):
        """Return the int32 index of each row of a matrix."""
        if self.is_simulated:
            return lax.iota(jnp.int32, rows)
        return plgpu.broadcasted_iota(
            jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
        )

    def store_transposed(self, ref, x) -> None:
        """Store x.T: wgmma wants the long side of its right operand contiguous."""
        if self.is_simulated:
            ref[...] = x.T
        else:
            ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def product(self, shape: tuple[int, int], left, right):
        """Return left @ right as float32 registers; `right` is in shared memory."""
        [product] = self.products(shape, [(left, right)])
        return product

    def products(self, shape: tuple[int, int], pairs, dtype=jnp.float32):
        """Return left @ right of each pair, summed in `dtype`."""
        if self.is_simulated:
            return [_simulated_product(left, right, dtype) for left, right in pairs]

        def multiply(*accs):
            for acc_ref, (left, right) in zip(accs, pairs, strict=True):
                plgpu.wgmma(acc_ref, left, right)
            return [acc_ref[...] for acc_ref in accs]

        return pl.run_scoped(multiply, *[plgpu.ACC(shape, dtype)] * len(pairs))

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


def _simulated_product(left, right, dtype=jnp.float32):
    """Multiply as a thread would, because the race detector sees no wgmma's operands.

    The commit says that the reads are done, for the copies that overwrite a stage.
    """
    left, right = left[...], right[...]
    plgpu.commit_smem()
    return jnp.dot(left, right, preferred_element_type=dtype)


def _widen(x, dtype):
    return x.astype(dtype)
