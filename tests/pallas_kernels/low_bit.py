"""Random cases of quantised keys and values, for the kernels' tests.

Codes and scales are drawn as they lie in the cache, and what they stand for follows
from them. Slots that no token was written to hold any bits, and scales of NaN or
infinity.
"""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.helpers import random_paged_case

GROUP = 32
FLOAT8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values of all blocks: as stored, and what they stand for."""

    codes: np.ndarray
    scales: np.ndarray | None
    dequantised: np.ndarray  # float64


def random_side(rng, format_name, shape, *, size=1.0):
    """Draw codes and scales, of normal size times `size`, scales within a factor of 4.

    "_static" at the end of a format's name: without scales.
    """
    name = format_name.removesuffix("_static")
    *slots, head_dim = shape
    if name == "int4":
        codes = rng.integers(-8, 8, shape)
        groups = -(-head_dim // GROUP)
        scales = _scales(rng, (*slots, groups), size / 4.6).astype(ml_dtypes.bfloat16)
        scales *= rng.choice([-1, 1], scales.shape).astype(ml_dtypes.bfloat16)
        of_elements = np.repeat(scales.astype(np.float64), GROUP, axis=-1)
        nibbles = (codes & 15).astype(np.uint8)
        packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        return Side(packed, scales, codes * of_elements[..., :head_dim])
    if name == "int8":
        codes = rng.integers(-127, 128, shape).astype(np.int8)
        unit = size / 73
    else:
        top = float(ml_dtypes.finfo(FLOAT8[name]).max)
        codes = (rng.standard_normal(shape) * top / 8).astype(FLOAT8[name])
        unit = size * 8 / top
    if format_name.endswith("_static"):
        return Side(codes, None, codes.astype(np.float64))
    scales = _scales(rng, slots, unit).astype(np.float32)
    return Side(codes, scales, codes * scales.astype(np.float64)[..., None])


def _scales(rng, shape, size):
    return size * 2 ** rng.uniform(-1, 1, shape)


def low_bit_case(workload, k_format, v_format, *, dtype="bfloat16", seed=0, v_size=1.0):
    """Build a case whose keys and values have these formats; "plain" is `dtype`.

    Returns:
        (case, arrays): `keys`, `values` and q of the case are what the arrays stand
        for; the arrays are those of `paged_attention`, by name.
    """
    rng = np.random.default_rng(seed)
    case = random_paged_case(workload, seed=seed, dtype=dtype)
    layer = case.cache.layers[0]
    arrays, dequantised = {}, {}
    for name, format_name, plain in (
        ("k", k_format, layer.k),
        ("v", v_format, layer.v),
    ):
        is_written = np.isfinite(np.asarray(plain, np.float32)).all(axis=(1, 3))
        if format_name == "plain":
            side = Side(np.asarray(plain), None, np.asarray(plain, np.float64))
        else:
            size = v_size if name == "v" else 1.0
            side = random_side(rng, format_name, plain.shape, size=size)
            for block, slot in np.argwhere(~is_written):
                spoil(rng, side, (block, slice(None), slot))
        arrays[f"{name}_blocks"] = jnp.asarray(side.codes)
        if side.scales is not None:
            arrays[f"{name}_scales"] = jnp.asarray(side.scales)
        dequantised[name] = side.dequantised
    keys, values = (
        [_row(dequantised[name], table, kv_len) for table, kv_len in _rows(case)]
        for name in ("k", "v")
    )
    q = jnp.asarray(case.q, dtype)
    width = case.block_tables.shape[1]
    is_used = np.arange(width) < -(-case.kv_lens // workload.block_size)[:, None]
    arrays |= {
        "q": q,
        # What stands behind a row's last block is never looked at.
        "block_tables": jnp.asarray(
            np.where(is_used, case.block_tables, 2**30), jnp.int32
        ),
        "kv_lens": jnp.asarray(case.kv_lens),
        "cu_q_lens": jnp.asarray(case.cu_q_lens),
    }
    q = np.asarray(q, np.float32)
    return dataclasses.replace(case, q=q, keys=keys, values=values), arrays


def _rows(case):
    return zip(case.block_tables, case.kv_lens[: len(case.keys)], strict=False)


def _row(blocks, table, kv_len):
    """Return a row's vectors [kv_len, kv_heads, head_dim]."""
    slots = blocks[table].swapaxes(1, 2)
    return slots.reshape(-1, *slots.shape[2:])[:kv_len]


def spoil(rng, side, place):
    """Leave any bits in some slots, and no finite scale."""
    bits = side.codes.view(np.uint8)
    bits[place] = rng.integers(0, 256, bits[place].shape)
    if side.scales is not None:
        nothing = rng.choice([np.nan, np.inf, -np.inf], side.scales[place].shape)
        side.scales[place] = nothing
