"""How stored K and V vectors are laid out, and how many bytes they take: `KVFormat`.

A *vector* is one token's key (or value) of one KV head, `head_dim` long. What is
described here is computed in `device/codec.py`.
"""

from dataclasses import dataclass

GROUP_SIZE = 32
"""Elements of a vector that share a scale in the formats of 4 bits."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**100
"""Of calibrated scales: below float32 is subnormal, which devices take for 0; above the
largest code times the scale is infinite."""

_PLAIN = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
_PER_VECTOR = ("int8", "fp8_e4m3", "fp8_e5m2")
_STATIC = ("fp8_e4m3_static", "fp8_e5m2_static")
_GROUPED = {"int4": 1, "int4_asymmetric": 2}  # bfloat16 numbers a group
KV_FORMATS = (*_PLAIN, *_PER_VECTOR, *_STATIC, *_GROUPED)
"""The names that `kv_cache_dtype` takes, besides `auto`."""


@dataclass(frozen=True)
class KVFormat:
    """The form of a layer's stored keys, or values.

    | name | a vector is stored as |
    |---|---|
    | float32, bfloat16, float16 | itself |
    | int8, fp8_e4m3, fp8_e5m2 | codes of one byte, and one float32 scale |
    | fp8_e4m3_static, fp8_e5m2_static | codes of one byte; the layer has one scale |
    | int4 | codes of half a byte, and a bfloat16 scale for each group of 32 |
    | int4_asymmetric | the same, and a bfloat16 centre for each group |

    Attributes:
        name: One of `KV_FORMATS`.
        is_rotated: Vectors are multiplied by an orthonormal Hadamard matrix first; only
            the formats of 4 bits.
        scale: What codes are multiplied by; only the static formats.
    """

    name: str
    is_rotated: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        assert self.name in KV_FORMATS
        assert not self.is_rotated or self.has_groups
        assert (self.scale is not None) == (self.name in _STATIC)

    def __str__(self) -> str:
        """Say all that stored bytes mean; equal only where they mean the same."""
        parts = [self.name]
        if self.is_rotated:
            parts.append("rotated")
        if self.scale is not None:
            parts.append(f"scale={float(self.scale)!r}")
        return "+".join(parts)

    @property
    def is_plain(self) -> bool:
        """Whether vectors are stored as they are, cast at most."""
        return self.name in _PLAIN

    @property
    def is_transformed(self) -> bool:
        """Whether queries or outputs must be rotated or scaled to match."""
        return self.is_rotated or self.scale is not None

    @property
    def has_groups(self) -> bool:
        """Whether groups of a vector's elements have scales of their own: 4 bits."""
        return self.name in _GROUPED

    @property
    def has_centers(self) -> bool:
        """Whether groups have centres too."""
        return _GROUPED.get(self.name) == 2

    def code_bytes(self, head_dim: int) -> int:
        """Return the bytes of a vector's elements."""
        if self.has_groups:
            return head_dim // 2
        return head_dim * _PLAIN.get(self.name, 1)

    def vector_bytes(self, head_dim: int) -> int:
        """Return the bytes of a vector, scales and centres included."""
        extra = 4 if self.name in _PER_VECTOR else 0
        if self.has_groups:
            extra = 2 * _GROUPED[self.name] * num_groups(head_dim)
        return self.code_bytes(head_dim) + extra


def num_groups(head_dim: int) -> int:
    """Return how many groups a vector has; the last one may be shorter."""
    return -(-head_dim // GROUP_SIZE)


def split_kv_cache_dtype(kv_cache_dtype: str) -> tuple[str, str]:
    """Split "K:V" into the formats of keys and values; one name is for both.

    Raises:
        ValueError: A name is not one of `KV_FORMATS` or `auto`.
    """
    allowed = ("auto", *KV_FORMATS)
    names = kv_cache_dtype.split(":") if isinstance(kv_cache_dtype, str) else []
    if len(names) not in (1, 2) or not set(names) <= set(allowed):
        raise ValueError(
            f"kv_cache_dtype must be one of {allowed}, or two of them as 'K:V', got "
            f"{kv_cache_dtype!r}"
        )
    return names[0], names[-1]


def has_4_bits(kv_cache_dtype: str) -> bool:
    """Say whether keys or values are stored in 4 bits."""
    return any(name in _GROUPED for name in split_kv_cache_dtype(kv_cache_dtype))


def has_static_scale(kv_cache_dtype: str) -> bool:
    """Say whether keys or values need a scale that was calibrated."""
    return any(name in _STATIC for name in split_kv_cache_dtype(kv_cache_dtype))


def make_kv_format(name: str, rotation: bool, scale: float | None) -> KVFormat:
    """Make a format; rotation and scale only go to one that has such."""
    return KVFormat(
        name,
        is_rotated=rotation and name in _GROUPED,
        scale=scale if name in _STATIC else None,
    )
