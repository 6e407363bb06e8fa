"""Low-bit vectors decoded once more, in numpy and by the documented layout alone."""

import ml_dtypes
import numpy as np

from jaxkv.device.codec import Quantized

FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LOW_BIT = (
    "int8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e4m3_static",
    "fp8_e5m2_static",
    "int4",
    "int4_asymmetric",
)
MIXED = ("int8:int4", "int4:fp8_e4m3", "float32:int4_asymmetric", "fp8_e5m2:bfloat16")


def stored_codes(stored):
    """Return the codes of vectors as float64 [..., head_dim]."""
    codes = np.asarray(stored.codes)
    name = stored.format.name
    if name == "int8":
        return codes.astype(np.float64)
    if name.startswith("fp8"):
        return codes.view(FLOAT8[name.split("_")[1]]).astype(np.float64)
    halves = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int64)
    halves = np.where(halves >= 8, halves - 16, halves)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    return halves.reshape(shape).astype(np.float64)


def of_elements(of_groups, head_dim):
    """Repeat what belongs to a group of 32 for each of its elements."""
    wide = np.asarray(of_groups).astype(np.float64)
    return wide[..., np.arange(head_dim) // 32]


@np.errstate(invalid="ignore")  # unwritten slots may have scales that are infinite
def decoded(stored):
    """Return the vectors that were stored, float64; rotated ones rotated back."""
    if not isinstance(stored, Quantized):
        return np.asarray(stored).astype(np.float64)
    values = stored_codes(stored)
    head_dim = values.shape[-1]
    if stored.format.scale is not None:
        return values * stored.format.scale
    if stored.scales.ndim < values.ndim:
        return values * np.asarray(stored.scales, np.float64)[..., None]
    values *= of_elements(stored.scales, head_dim)
    if stored.centers is not None:
        values += of_elements(stored.centers, head_dim)
    return values @ hadamard(head_dim) if stored.format.is_rotated else values


def hadamard(head_dim):
    """Return the matrix of signs (-1)^popcount(i & j), of unit rows, on a diagonal."""
    size = head_dim & -head_dim
    index = np.arange(size)
    signs = np.vectorize(lambda i: (-1.0) ** int(i).bit_count())
    matrix = signs(index[:, None] & index[None, :]) / np.sqrt(size)
    result = np.zeros((head_dim, head_dim))
    for begin in range(0, head_dim, size):
        result[begin : begin + size, begin : begin + size] = matrix
    return result
