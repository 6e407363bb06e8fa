"""How keys or values lie in the cache, and how they become an operand of wgmma.

It owns one side of the cache, keys or values, from the pool's dtypes to the 16-bit
operand: what lies in the ring, and which factor is left for the scores or the weights.
A scale per key waits for those, so that products take the codes, which are exact in 16
bits.
"""

# Pallas' own classes and names confuse the type checker.
# pyright: reportAbstractUsage=false

import abc
from typing import Any, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import SWIZZLED, TILE_KV, Registers, Stored, swizzled

GROUP = 32
"""Elements of a vector that share a scale in int4."""
_Q_TERMS = 3


class Operand(abc.ABC):
    """A side of the cache, keys or values.

    Attributes:
        dtype: Of the operand: that of the queries or the weights that it meets.
        head_dim: Elements of a vector.
    """

    def __init__(self, dtype: Any, head_dim: int):
        self.dtype = dtype
        self.head_dim = head_dim

    @abc.abstractmethod
    def pool(self, slots: tuple[int, ...]) -> Stored:
        """Return the shapes and dtypes of a pool of so many slots.

        Args:
            slots: (num_blocks, kv_heads, block_size).
        """

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a key's codes and scales, for one KV head."""
        arrays = jax.tree.leaves(self.pool((1, 1, 1)))
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def seen(self, side: Stored) -> Stored:
        """Return a pool as the kernel's references see it."""
        return side

    def queries(self, lines: int) -> Stored:
        """Return the scratch types of the queries that meet keys."""
        shape = (lines, self.head_dim)
        return Stored(plgpu.SMEM(shape, self.dtype, transforms=SWIZZLED))

    def asked(self, q: jax.Array) -> Stored:
        """Return queries [..., lines, head_dim] as keys meet them."""
        if q.dtype == self.dtype:
            return Stored(q)
        limit = float(jnp.finfo(self.dtype).max)  # saturate: it may have less range
        return Stored(jnp.clip(q.astype(jnp.float32), -limit, limit).astype(self.dtype))

    @abc.abstractmethod
    def stages(self, num_stages: int) -> Stored:
        """Return the scratch types of a ring's stages."""

    @abc.abstractmethod
    def tile(self) -> Any:
        """Return the scratch type of a widened tile of values; None: there is none."""

    @abc.abstractmethod
    def products(self, stage: Stored, q: Stored, registers: Registers) -> Any:
        """Return keys times queries, float32 [TILE_KV, lines], scales included."""

    @abc.abstractmethod
    def factors(self, stage: Stored, num_written, registers: Registers) -> Any:
        """Return what each key's weight is multiplied by, 0 if unwritten; or None."""

    @abc.abstractmethod
    def values(self, stage: Stored, tile, num_written, registers: Registers) -> Any:
        """Return where the operand lies; what was stored there is not committed."""

    @abc.abstractmethod
    def zero_from(self, stage: Stored, num_kept, *, registers: Registers) -> None:
        """Make the products of a stage's values from a key on finite."""


def operand_of(side: Stored, q: jax.Array, name: str) -> Operand:
    """Return how such a side of the cache becomes an operand.

    Args:
        side: One layer's keys or values.
        q: The queries.
        name: Of the side, for messages.

    Raises:
        NotImplementedError: The kernel cannot do this; the message names what.
    """
    dtype, head_dim = side.codes.dtype, q.shape[-1]
    if dtype == q.dtype:
        return Plain(q.dtype, head_dim)
    if dtype == jnp.int8:
        return PerKeyInt8(q.dtype, head_dim, dtype, has_scales=True)
    if dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        # Hopper converts float8 to no other 16-bit dtype.
        has_scales = side.scales is not None
        return PerKey(jnp.float16, head_dim, dtype, has_scales=has_scales)
    if dtype == jnp.uint8 and q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"int4 {name} with queries of {q.dtype}")
    if dtype == jnp.uint8 and head_dim // GROUP not in (2, 4, 8):
        raise NotImplementedError(f"int4 {name} of head_dim {head_dim}")
    if dtype == jnp.uint8:
        return PerGroup(q.dtype, head_dim)
    raise NotImplementedError(f"a cache of {dtype} {name} with queries of {q.dtype}")


class Plain(Operand):
    """A side in the queries' dtype: the operand is what the cache holds."""

    @override
    def pool(self, slots: tuple[int, ...]) -> Stored:
        return Stored(jax.ShapeDtypeStruct((*slots, self.head_dim), self.dtype))

    @override
    def stages(self, num_stages: int) -> Stored:
        shape = (num_stages, TILE_KV, self.head_dim)
        return Stored(plgpu.SMEM(shape, self.dtype, transforms=SWIZZLED))

    @override
    def tile(self) -> Any:
        return None

    @override
    def products(self, stage: Stored, q: Stored, registers: Registers) -> Any:
        shape = (TILE_KV, q.codes.shape[0])
        return registers.product(shape, stage.codes, q.codes.T)

    @override
    def factors(self, stage: Stored, num_written, registers: Registers) -> Any:
        return None

    @override
    def values(self, stage: Stored, tile, num_written, registers: Registers) -> Any:
        return stage.codes

    @override
    def zero_from(self, stage: Stored, num_kept, *, registers: Registers) -> None:
        """Zero: slots that hold nothing may hold NaN, and 0 * NaN is NaN."""
        _zero_from(stage.codes, num_kept, self.dtype, registers)


class PerKey(Operand):
    """Codes of 8 bits, and a scale per key or none.

    Keys are widened in registers. Values are on the way to a tile in shared memory:
    wgmma takes a transposed left operand from nowhere else.
    """

    def __init__(
        self, dtype: Any, head_dim: int, codes_dtype: Any, *, has_scales: bool
    ):
        super().__init__(dtype, head_dim)
        self.codes_dtype = codes_dtype
        self.has_scales = has_scales

    @override
    def pool(self, slots: tuple[int, ...]) -> Stored:
        codes = jax.ShapeDtypeStruct((*slots, self.head_dim), self.codes_dtype)
        scales = jax.ShapeDtypeStruct(slots, jnp.float32)
        return Stored(codes, scales if self.has_scales else None)

    @override
    def stages(self, num_stages: int) -> Stored:
        shape = (num_stages, TILE_KV, self.head_dim)
        codes = plgpu.SMEM(
            shape, self.codes_dtype, transforms=swizzled(self.head_dim, 8)
        )
        scales = plgpu.SMEM(shape[:2], jnp.float32)
        return Stored(codes, scales if self.has_scales else None)

    @override
    def tile(self) -> Any:
        return plgpu.SMEM((TILE_KV, self.head_dim), self.dtype, transforms=SWIZZLED)

    @override
    def products(self, stage: Stored, q: Stored, registers: Registers) -> Any:
        shape = (TILE_KV, q.codes.shape[0])
        codes = registers.load_left(stage.codes, self.dtype)
        products = registers.product(shape, codes, q.codes.T)
        if not self.has_scales:
            return products
        scales = registers.load_per_row(stage.scales)
        return products * lax.broadcast_in_dim(scales, shape, [0])

    @override
    def factors(self, stage: Stored, num_written, registers: Registers) -> Any:
        if not self.has_scales:
            return None
        is_written = registers.iota_of_rows(TILE_KV) < num_written
        return jnp.where(is_written, registers.load_per_row(stage.scales), 0.0)

    @override
    def values(self, stage: Stored, tile, num_written, registers: Registers) -> Any:
        tile[...] = registers.load_narrow(stage.codes, self.dtype)
        return tile

    @override
    def zero_from(self, stage: Stored, num_kept, *, registers: Registers) -> None:
        """Zero what may be NaN; any int8 is finite."""
        if jnp.issubdtype(self.codes_dtype, jnp.floating):
            _zero_from(stage.codes, num_kept, self.dtype, registers)


class PerKeyInt8(PerKey):
    """Codes of int8 and a scale per key.

    As keys they meet queries of int8, and none is widened: q is the sum of its
    `_Q_TERMS` codes[i] / 254**i, times a scale per line, within 254**-3 of the line's
    largest element.
    """

    @override
    def queries(self, lines: int) -> Stored:
        shape = (_Q_TERMS * lines, self.head_dim)
        codes = plgpu.SMEM(shape, jnp.int8, transforms=swizzled(self.head_dim, 8))
        return Stored(codes, plgpu.SMEM((lines,), jnp.float32))

    @override
    def asked(self, q: jax.Array) -> Stored:
        rest = q.astype(jnp.float32)
        scales = jnp.maximum(jnp.abs(rest).max(axis=-1), 1e-30) / 127
        rest = rest / scales[..., None]
        codes = []
        for _ in range(_Q_TERMS):
            codes.append(jnp.rint(rest))
            rest = (rest - codes[-1]) * 254  # at most 127 again
        return Stored(jnp.concatenate(codes, axis=-2).astype(jnp.int8), scales)

    @override
    def products(self, stage: Stored, q: Stored, registers: Registers) -> Any:
        lines = q.scales.shape[0]
        shape = (TILE_KV, lines)
        terms = registers.products(
            shape,
            [
                (stage.codes, q.codes.at[pl.ds(term * lines, lines)].T)
                for term in range(_Q_TERMS)
            ],
            jnp.int32,
        )
        products = terms[0].astype(jnp.float32)
        for power, term in enumerate(terms[1:], start=1):
            products += term.astype(jnp.float32) * 254.0**-power
        of_keys = registers.load_per_row(stage.scales)
        of_lines = registers.load_per_column(q.scales)
        products *= lax.broadcast_in_dim(of_keys, shape, [0])
        return products * lax.broadcast_in_dim(of_lines, shape, [1])


class PerGroup(Operand):
    """Codes of 4 bits, two to a byte, and a scale per group of 32 elements.

    Keys take a product per group, whose scale goes onto it. Values get theirs on the
    way to a tile in shared memory.
    """

    @override
    def pool(self, slots: tuple[int, ...]) -> Stored:
        return Stored(
            jax.ShapeDtypeStruct((*slots, self.head_dim // 2), jnp.uint8),
            jax.ShapeDtypeStruct((*slots, self.head_dim // GROUP), jnp.bfloat16),
        )

    @override
    def seen(self, side: Stored) -> Stored:
        codes = lax.bitcast_convert_type(side.codes, jnp.int4)  # low nibble first
        scales = side.scales
        return Stored(
            codes.reshape(*codes.shape[:-2], self.head_dim),
            scales.reshape(*scales.shape[:2], -1),
        )

    @override
    def queries(self, lines: int) -> Stored:
        # A swizzle of 64 bytes: of 32 elements, as a group is.
        transforms = swizzled(2 * GROUP, 16)
        return Stored(
            plgpu.SMEM((lines, self.head_dim), self.dtype, transforms=transforms)
        )

    @override
    def stages(self, num_stages: int) -> Stored:
        shape = (num_stages, TILE_KV, self.head_dim)
        codes = plgpu.SMEM(shape, jnp.int4, transforms=swizzled(self.head_dim // 2, 4))
        groups = self.head_dim // GROUP
        scales = plgpu.SMEM((num_stages, TILE_KV * groups), jnp.bfloat16)
        return Stored(codes, scales)

    @override
    def tile(self) -> Any:
        return plgpu.SMEM((TILE_KV, self.head_dim), self.dtype, transforms=SWIZZLED)

    @override
    def products(self, stage: Stored, q: Stored, registers: Registers) -> Any:
        shape = (TILE_KV, q.codes.shape[0])
        codes = registers.load_left(stage.codes, self.dtype)
        groups = range(0, self.head_dim, GROUP)
        products = registers.products(
            shape,
            [
                (codes[:, start : start + GROUP], q.codes.at[:, pl.ds(start, GROUP)].T)
                for start in groups
            ],
        )
        scaled = [
            product * lax.broadcast_in_dim(scales, shape, [0])
            for product, scales in zip(
                products, self._scales(stage, registers), strict=True
            )
        ]
        return sum(scaled[1:], start=scaled[0])

    @override
    def factors(self, stage: Stored, num_written, registers: Registers) -> Any:
        return None

    @override
    def values(self, stage: Stored, tile, num_written, registers: Registers) -> Any:
        is_written = registers.iota_of_rows(TILE_KV) < num_written
        codes = registers.load_narrow(stage.codes, self.dtype)
        parts = []
        for group, scales in enumerate(self._scales(stage, registers)):
            scales = jnp.where(is_written, scales, 0.0).astype(self.dtype)
            part = codes[:, group * GROUP : (group + 1) * GROUP]
            parts.append(part * lax.broadcast_in_dim(scales, part.shape, [0]))
        tile[...] = jnp.concatenate(parts, axis=1)
        return tile

    def _scales(self, stage: Stored, registers: Registers) -> list[Any]:
        """Return the keys' scales of each group."""
        return registers.load_columns(stage.scales, self.head_dim // GROUP)

    @override
    def zero_from(self, stage: Stored, num_kept, *, registers: Registers) -> None:
        """Any code is finite; scales are not zeroed here, but left out."""


def _zero_from(ref, num_kept, dtype: Any, registers: Registers) -> None:
    """Zero the rows of a tile from `num_kept` on, by way of a 16-bit dtype."""
    keys, columns = ref.shape
    width = min(columns, 128 // ref.dtype.itemsize)  # few registers at a time
    kept = registers.iota((keys, width), 0) < num_kept
    for column in range(0, columns, width):
        part = ref.at[:, pl.ds(column, width)]
        read = part[...].astype(dtype)
        part[...] = jnp.where(kept, read, jnp.zeros_like(read)).astype(ref.dtype)
