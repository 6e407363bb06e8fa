"""How K and V vectors become stored bytes and back.

A plain format is an array; the others are `Quantized`: codes with the scales that go
with them, one pytree, so that whatever moves blocks with `jax.tree.map` moves both.
Formats are described by `KVFormat`.

int8 and float8 have a scale for each vector; 4 bits have one for each group of 32
elements, signed as in llama.cpp's Q4_0, and may be rotated first (QuaRot, Ashkboos et
al., 2024). A decoded element is code * scale, in `int4_asymmetric` centre + code *
scale. Scales and centres are rounded to the precision they are stored in before codes
are chosen. Codes saturate. An infinite element counts as the largest finite one of the
input's dtype, a NaN is stored as 0, and no scale is ever 0. The formats of 4 bits
saturate a little earlier, and rotated ones at about 1/sqrt(head_dim) of the largest
float32. Plain formats saturate where they are narrower than the input, and keep NaN.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Int32, UInt8

from jaxkv.config import DTYPES
from jaxkv.kv_format import GROUP_SIZE, KVFormat, num_groups

_FLOAT8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest scale: normal, not flushed
_LARGEST = float(jnp.finfo(jnp.float32).max)
_FLOAT8_NAN = 0x7F  # in both
_STRETCHES = (1.0, 8 / 7, 0.94, 0.86)  # of a group's range; the first that is best


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "centers"),
    meta_fields=("format",),
)
@dataclass(frozen=True)
class Quantized:
    """Vectors as codes and scales; leading axes are whatever they are.

    Attributes:
        codes: int8 [..., head_dim]; or uint8 of the same shape, the bits of a float8
            (CPUs rewrite the whole pool when they scatter float8 itself); or, of 4
            bits, uint8 [..., head_dim / 2]: element 2i in the low half of byte i and
            element 2i + 1 in the high one, as two's complement.
        scales: float32 [...], or bfloat16 [..., groups]; None for the static formats.
        centers: bfloat16 [..., groups], or None.
        format: The form, static.
    """

    codes: Any
    scales: Any
    centers: Any
    format: KVFormat

    @property
    def head_dim(self) -> int:
        """Elements of a vector."""
        return self.codes.shape[-1] * (2 if self.format.has_groups else 1)


Stored = jax.Array | Quantized
"""Vectors in any format."""


def format_of(stored: Stored) -> KVFormat:
    """Return the form of stored vectors.

    Raises:
        ValueError: They are an array of a dtype that is no format.
    """
    if isinstance(stored, Quantized):
        return stored.format
    name = str(stored.dtype)
    if name not in DTYPES:
        raise ValueError(f"keys and values of {name}: arrays must be of {DTYPES}")
    return KVFormat(name)


def vector_shape(stored: Stored) -> tuple[int, ...]:
    """Return the shape that decoded vectors have."""
    if isinstance(stored, Quantized):
        return (*stored.codes.shape[:-1], stored.head_dim)
    return stored.shape


def init_blocks(
    kv_format: KVFormat,
    shape: tuple[int, int, int, int],
    sharding: jax.sharding.Sharding | None = None,
) -> Stored:
    """Allocate blocks [num_blocks, kv_heads, block_size, head_dim] of zero vectors."""
    *leading, head_dim = shape
    if kv_format.is_plain:
        return jnp.zeros(shape, kv_format.name, device=sharding)
    groups = (*leading, num_groups(head_dim))
    scales = centers = None
    if kv_format.has_groups:
        scales = jnp.ones(groups, jnp.bfloat16, device=sharding)
    elif kv_format.scale is None:
        scales = jnp.ones(leading, jnp.float32, device=sharding)
    if kv_format.has_centers:
        centers = jnp.zeros(groups, jnp.bfloat16, device=sharding)
    dtype = jnp.int8 if kv_format.name == "int8" else jnp.uint8
    codes = (*leading, kv_format.code_bytes(head_dim))
    return Quantized(
        codes=jnp.zeros(codes, dtype, device=sharding),
        scales=scales,
        centers=centers,
        format=kv_format,
    )


def encode(x: Float[Array, "*leading head_dim"], kv_format: KVFormat) -> Stored:
    """Bring vectors into a format.

    Returns:
        What `init_blocks` returns, with the leading axes of `x`.
    """
    if kv_format.is_plain:
        return _cast(x, jnp.dtype(kv_format.name))
    largest = float(jnp.finfo(x.dtype).max)
    x = jnp.nan_to_num(x.astype(jnp.float32), nan=0.0, posinf=largest, neginf=-largest)
    if kv_format.has_groups:
        # 16 / 15 of a range must be finite, and so must the sums of a rotation; and
        # rounded scales must not lead beyond the input's dtype.
        finite = 14 / 15 * _LARGEST
        if kv_format.is_rotated:
            finite /= math.sqrt(_rotation_size(x.shape[-1]))
        finite = min(finite, largest * (1 - 2**-8))
        x = jnp.clip(x, -finite, finite)
        return _encode_groups(_rotate(x) if kv_format.is_rotated else x, kv_format)
    largest_code = _largest_code(kv_format)
    scales = kv_format.scale
    if scales is None:
        scales = jnp.max(jnp.abs(x), axis=-1) / largest_code
        scales = jnp.clip(scales, _TINY, _LARGEST / largest_code * (1 - 2**-20))
        x = x / scales[..., None]
    else:
        x = x / scales
        scales = None
    x = jnp.clip(x, -largest_code, largest_code)
    if kv_format.name == "int8":
        codes = jnp.round(x).astype(jnp.int8)
    else:
        codes = lax.bitcast_convert_type(x.astype(_float8(kv_format)), jnp.uint8)
    return Quantized(codes=codes, scales=scales, centers=None, format=kv_format)


def decode(stored: Stored) -> Float[Array, "*leading head_dim"]:
    """Return vectors in float32, as `prepare_queries` and `restore_outputs` want them.

    Rotated ones stay rotated, and codes of static formats are not scaled.
    """
    if not isinstance(stored, Quantized):
        return stored.astype(jnp.float32)
    if stored.format.has_groups:
        return _decode_groups(stored)
    values = typed_codes(stored).astype(jnp.float32)
    return values if stored.scales is None else values * stored.scales[..., None]


def typed_codes(stored: Quantized) -> jax.Array:
    """Return codes with float8 ones as such; those of 4 bits stay packed."""
    if stored.format.name == "int8" or stored.format.has_groups:
        return stored.codes
    return lax.bitcast_convert_type(stored.codes, _float8(stored.format))


def prepare_queries(
    q: Float[Array, "*leading head_dim"], k_format: KVFormat
) -> Float[Array, "*leading head_dim"]:
    """Return queries whose scores with decoded keys are those with the keys.

    float32, unless nothing is to be done: rotated elements may be larger than any of
    their vector, and scales are not to be rounded to fewer bits.
    """
    return _transform(q, k_format)


def restore_outputs(
    out: Float[Array, "*leading head_dim"], v_format: KVFormat
) -> Float[Array, "*leading head_dim"]:
    """Return sums of values, given the same sums of decoded ones; likewise float32."""
    return _transform(out, v_format)  # a rotation is its own inverse


def _transform(
    x: Float[Array, "*leading head_dim"], kv_format: KVFormat
) -> Float[Array, "*leading head_dim"]:
    if kv_format.is_rotated:
        return _rotate(x.astype(jnp.float32))
    if kv_format.scale is not None:
        return x.astype(jnp.float32) * kv_format.scale
    return x


def poison(stored: Stored, block_ids: Int32[Array, " blocks"]) -> Stored:
    """Fill blocks with what decodes to NaN; one may be named several times."""

    def fill(array: jax.Array, value: float | int) -> jax.Array:
        return array.at[block_ids].set(jnp.array(value, array.dtype))

    if not isinstance(stored, Quantized):
        return fill(stored, jnp.nan)
    if stored.scales is None:
        return dataclasses.replace(stored, codes=fill(stored.codes, _FLOAT8_NAN))
    return dataclasses.replace(stored, scales=fill(stored.scales, jnp.nan))


def _cast(
    x: Float[Array, "*leading head_dim"], dtype: jnp.dtype
) -> Float[Array, "*leading head_dim"]:
    """Cast, saturating where the range is smaller."""
    largest = jnp.finfo(dtype).max
    if float(largest) < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -largest.astype(x.dtype), largest.astype(x.dtype))
    return x.astype(dtype)


def _float8(kv_format: KVFormat) -> Any:
    return _FLOAT8[kv_format.name.split("_")[1]]


def _largest_code(kv_format: KVFormat) -> float:
    """Return the largest code of a format of 8 bits."""
    if kv_format.name == "int8":
        return 127.0
    return float(jnp.finfo(_float8(kv_format)).max)


def _encode_groups(
    x: Float[Array, "*leading head_dim"], kv_format: KVFormat
) -> Quantized:
    """Quantise to 4 bits, group by group.

    Each group takes, of a few ranges, the one of least squared error: to clip its
    extremes a little may serve the other elements better. By 8 / 7 both ends get codes,
    7 and -7, where they are alike.
    """
    lowest = _over_groups(x, jnp.min, fill=jnp.inf)
    highest = _over_groups(x, jnp.max, fill=-jnp.inf)
    # Halved first: where the ends are the largest floats, their sum is infinite.
    middle = lowest / 2 + highest / 2 if kv_format.has_centers else 0.0
    least_error = jnp.full_like(lowest, jnp.inf)
    scales, centers = _steps(lowest, highest, kv_format)
    for stretch in _STRETCHES:
        low = middle + (lowest - middle) * stretch
        high = middle + (highest - middle) * stretch
        steps = _steps(low, high, kv_format)
        difference = _from_codes(_to_codes(x, *steps), *steps) - x
        error = _over_groups(difference * difference, jnp.sum, fill=0.0)
        is_better = error < least_error
        least_error = jnp.where(is_better, error, least_error)
        scales, centers = (
            jnp.where(is_better, new, old)
            for new, old in zip(steps, (scales, centers), strict=True)
        )
    codes = _to_codes(x, scales, centers)
    return Quantized(
        codes=_pack(codes.astype(jnp.int8)),
        scales=scales.astype(jnp.bfloat16),
        centers=centers.astype(jnp.bfloat16) if kv_format.has_centers else None,
        format=kv_format,
    )


def _steps(
    lowest: Float[Array, "*leading groups"],
    highest: Float[Array, "*leading groups"],
    kv_format: KVFormat,
) -> tuple[Float[Array, "*leading groups"], Float[Array, "*leading groups"]]:
    """Return the scales and centres by which 16 codes reach from end to end.

    Without centres the end that is larger in size gets the code -8, whatever its sign,
    so scales have signs: that is one code more than symmetric ones would use.
    """
    if kv_format.has_centers:
        centers = _round_to_bfloat16(lowest * (7 / 15) + highest * (8 / 15))
        size = jnp.maximum(highest / 7 - centers / 7, centers / 8 - lowest / 8)
        return _round_to_bfloat16(jnp.maximum(size, _TINY)), centers
    size = jnp.maximum(highest, -lowest) / 8
    size = _round_to_bfloat16(jnp.maximum(size, _TINY))
    return jnp.where(highest > -lowest, -size, size), jnp.zeros_like(size)


def _to_codes(
    x: Float[Array, "*leading head_dim"],
    scales: Float[Array, "*leading groups"],
    centers: Float[Array, "*leading groups"],
) -> Float[Array, "*leading head_dim"]:
    """Return the whole numbers in [-8, 7] nearest to vectors."""
    head_dim = x.shape[-1]
    ratios = (x - _spread(centers, head_dim)) / _spread(scales, head_dim)
    return jnp.clip(jnp.round(ratios), -8, 7)


def _from_codes(
    codes: Float[Array, "*leading head_dim"],
    scales: Float[Array, "*leading groups"],
    centers: Float[Array, "*leading groups"] | None,
) -> Float[Array, "*leading head_dim"]:
    head_dim = codes.shape[-1]
    values = codes * _spread(scales, head_dim)
    return values if centers is None else values + _spread(centers, head_dim)


def _decode_groups(stored: Quantized) -> Float[Array, "*leading head_dim"]:
    scales, centers = jax.tree.map(
        lambda array: array.astype(jnp.float32), (stored.scales, stored.centers)
    )
    return _from_codes(_unpack(stored.codes).astype(jnp.float32), scales, centers)


def _over_groups(
    x: Float[Array, "*leading head_dim"],
    reduce: Callable[..., jax.Array],
    *,
    fill: float,
) -> Float[Array, "*leading groups"]:
    """Reduce each group to one number; what the last one lacks is `fill`."""
    *leading, head_dim = x.shape
    padding = [(0, 0)] * len(leading) + [(0, -head_dim % GROUP_SIZE)]
    padded = jnp.pad(x, padding, constant_values=fill)
    grouped = padded.reshape(*leading, num_groups(head_dim), GROUP_SIZE)
    return reduce(grouped, axis=-1)


def _spread(
    of_groups: Float[Array, "*leading groups"], head_dim: int
) -> Float[Array, "*leading head_dim"]:
    """Repeat a number of each group for its elements."""
    return jnp.repeat(of_groups, GROUP_SIZE, axis=-1)[..., :head_dim]


def _round_to_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round to a bfloat16's precision, in float32.

    A cast there and back would not do: XLA may leave out both.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _pack(codes: Int8[Array, "*leading head_dim"]) -> UInt8[Array, "*leading bytes"]:
    """Put two codes of 4 bits into a byte, the first one into its low half."""
    bits = lax.bitcast_convert_type(codes, jnp.uint8)
    return (bits[..., 0::2] & 0xF) | (bits[..., 1::2] << 4)


def _unpack(packed: UInt8[Array, "*leading bytes"]) -> Int8[Array, "*leading head_dim"]:
    """Undo `_pack`."""
    both = lax.bitcast_convert_type(packed, jnp.int8)
    low = lax.shift_right_arithmetic(lax.shift_left(both, jnp.int8(4)), jnp.int8(4))
    high = lax.shift_right_arithmetic(both, jnp.int8(4))
    *leading, num_bytes = packed.shape
    return jnp.stack([low, high], axis=-1).reshape(*leading, 2 * num_bytes)


def _rotate(x: Float[Array, "*leading head_dim"]) -> Float[Array, "*leading head_dim"]:
    """Multiply vectors by a symmetric orthonormal matrix, its own inverse."""
    matrix = jnp.asarray(_hadamard(x.shape[-1]))
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)


def _rotation_size(head_dim: int) -> int:
    """Return the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


@functools.cache
def _hadamard(head_dim: int) -> np.ndarray:
    """Return Sylvester's Hadamard matrices on a diagonal, of unit rows.

    They are as large as the largest power of two that divides `head_dim`: one matrix
    where that is a power of two, five of 16 for 80.
    """
    size = _rotation_size(head_dim)
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    blocks = np.kron(np.eye(head_dim // size), matrix / np.sqrt(size))
    return blocks.astype(np.float32)
