"""The entry point to the GPU kernels: which of them takes a case, if any can.

A kernel raises `NotImplementedError` for a case it cannot do, and only for that.
"""

import functools
import math
from typing import Any, no_type_check

import jax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.decode import max_lines, paged_decode
from pallas_kernels.mosaic import Stored, check_supported
from pallas_kernels.operands import Plain, operand_of
from pallas_kernels.prefill import paged_prefill
from pallas_kernels.target import check_hopper

MAX_DECODE_TOKENS = 8
"""Tokens a row, on average, up to which a batch goes to the kernel for decoding."""


@no_type_check  # it checks its own arguments, in tests and elsewhere
@functools.partial(
    jax.jit, static_argnames=("scale", "window", "soft_cap", "return_lse", "interpret")
)
def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Shaped[Array, "num_blocks kv_heads block_size _"],
    v_blocks: Shaped[Array, "num_blocks kv_heads block_size _"],
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    *,
    k_scales: Float[Array, "num_blocks kv_heads block_size *groups"] | None = None,
    v_scales: Float[Array, "num_blocks kv_heads block_size *groups"] | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    interpret: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Run ragged paged attention with a Pallas Mosaic GPU kernel.

    A batch of at most `MAX_DECODE_TOKENS` tokens a row on average goes to
    `paged_decode`, whatever its rows' lengths, others to `paged_prefill`. Which is
    faster is a matter of shapes, not of values: both do every ragged batch. Quantised
    keys or values always go to `paged_decode`.

    The dtype of a side's blocks says what they are, for keys and values apart:

    - q's own: the vectors.
    - int8, with scales float32 [num_blocks, kv_heads, block_size]: a vector is its
      codes times its scale.
    - float8_e4m3fn or float8_e5m2: likewise; without scales the codes are the vector.
    - uint8, with scales bfloat16 [num_blocks, kv_heads, block_size, head_dim / 32]: two
      codes of 4 bits to a byte, -8 to 7, element 2i in the low half of byte i; each 32
      elements have a scale.

    Args:
        q: Queries, the rows' one after another, padding last.
        k_blocks: One layer's keys.
        v_blocks: One layer's values.
        block_tables: Each row's blocks in order. Values are the caller's to check.
        kv_lens: Tokens each row attends to.
        cu_q_lens: Row r's queries are q[cu_q_lens[r]:cu_q_lens[r + 1]].
        k_scales: The keys' scales, if they are quantised.
        v_scales: The values', likewise.
        scale: Factor on the scores.
        window: Each query sees only its last `window` keys, its own included.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        return_lse: Return the scores' log-sum-exp too.
        interpret: `plgpu.InterpretGPUParams` to simulate the kernel on a CPU.

    Returns:
        The outputs in q's dtype, and with `return_lse` the float32 [tokens, q_heads]
        log-sum-exp of the scores; 0 and -inf for tokens past cu_q_lens[-1] and for
        queries that see no key.

    Raises:
        ValueError: Shapes or dtypes do not fit each other.
        NotImplementedError: No kernel can do this case, or none on this device; the
            message says what in it.
    """
    k, v = Stored(k_blocks, k_scales), Stored(v_blocks, v_scales)
    _check_arguments(q, k_blocks, v_blocks, block_tables, kv_lens, cu_q_lens)
    check_options(scale, window, soft_cap)
    options: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "interpret": interpret,
    }
    if interpret is None:
        check_hopper()
    check_supported(q, k_blocks.shape[2])
    keys, values = operand_of(k, q, "keys"), operand_of(v, q, "values")
    slots = k_blocks.shape[:3]
    _check_side("k", k, keys.pool(slots))
    _check_side("v", v, values.pool(slots))
    tokens_per_row = -(-q.shape[0] // block_tables.shape[0])
    fitting = max_lines(keys) // (q.shape[1] // k_blocks.shape[1])
    is_plain = isinstance(keys, Plain) and isinstance(values, Plain)
    kernel = paged_prefill
    if not is_plain or (tokens_per_row <= MAX_DECODE_TOKENS and fitting > 0):
        kernel = paged_decode
        options["tokens_per_tile"] = max(1, min(tokens_per_row, fitting))
    out, lse = kernel(q, k, v, block_tables, kv_lens, cu_q_lens, **options)
    return (out, lse) if return_lse else out


def _check_arguments(
    q: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> None:
    for name, array, dims in (
        ("q", q, "[tokens, q_heads, head_dim]"),
        ("k_blocks", k_blocks, "[num_blocks, kv_heads, block_size, head_dim]"),
        ("block_tables", block_tables, "[rows, width]"),
    ):
        if array.ndim != dims.count(",") + 1:
            raise ValueError(f"{name} has shape {array.shape}, expected {dims}")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}: nothing in it")
    slots = k_blocks.shape[:3]
    if v_blocks.shape[:3] != slots:
        raise ValueError(
            f"v_blocks has shape {v_blocks.shape}, expected {slots} and a head_dim, as "
            "k_blocks has"
        )
    kv_heads, rows = k_blocks.shape[1], block_tables.shape[0]
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q has shape {q.shape}, expected a multiple of {kv_heads} heads, as "
            "k_blocks has"
        )
    _check_like("block_tables", block_tables, block_tables.shape, "int32")
    _check_like("kv_lens", kv_lens, (rows,), "int32")
    _check_like("cu_q_lens", cu_q_lens, (rows + 1,), "int32")


def _check_side(name: str, side: Stored, expected: Stored) -> None:
    """Check a side's arrays against those that its codes' dtype stands for."""
    codes, scales = f"{name}_blocks", f"{name}_scales"
    _check_like(codes, side.codes, expected.codes.shape, expected.codes.dtype)
    if (side.scales is None) != (expected.scales is None):
        must = "be None" if expected.scales is None else "be given"
        raise ValueError(f"{scales} must {must}: {codes} is {side.codes.dtype}")
    if side.scales is not None:
        _check_like(scales, side.scales, expected.scales.shape, expected.scales.dtype)


def _check_like(
    name: str, array: jax.Array, shape: tuple[int, ...], dtype: Any
) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {array.dtype}")


def check_options(
    scale: float | None, window: int | None, soft_cap: float | None
) -> None:
    """Check what every implementation of paged attention takes besides arrays.

    Raises:
        ValueError: A value is out of range.
    """
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"window must be in [1, 2**31) or None, got {window}")
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number > 0 or None, got {value}")
