"""Ragged paged attention: checks the arguments and picks an implementation.

*Ragged*: one call serves rows with one query (decoding) beside rows with many
(prefill chunks). Query i of a row lies at position kv_len - q_len + i and sees that
row's keys at positions up to its own.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

import cpu_kernels
from jaxkv.device.attention_xla import paged_attention_xla
from jaxkv.device.cache import KVCache
from jaxkv.device.codec import (
    Quantized,
    Stored,
    decode,
    format_of,
    prepare_queries,
    restore_outputs,
    typed_codes,
    vector_shape,
)
from pallas_kernels import check_options, paged_attention_reference, target_device
from pallas_kernels import paged_attention as paged_attention_mosaic_gpu

Result = jax.Array | tuple[jax.Array, jax.Array]
Implementation = Callable[..., Result]


def _mosaic_gpu(
    q: jax.Array, k: Stored, v: Stored, *arrays: jax.Array, **options: Any
) -> Result:
    (k_blocks, k_scales), (v_blocks, v_scales) = map(_blocks_and_scales, (k, v))
    k_format, prepared = format_of(k), q
    if k_format.scale is not None:
        options["scale"] *= k_format.scale
    elif k_format.is_rotated:  # the kernels' queries have 16 bits
        prepared = prepare_queries(q, k_format).astype(q.dtype)
    result = paged_attention_mosaic_gpu(
        prepared,
        k_blocks,
        v_blocks,
        *arrays,
        k_scales=k_scales,
        v_scales=v_scales,
        **options,
    )
    return _restored(result, q, v)


def _blocks_and_scales(stored: Stored) -> tuple[jax.Array, jax.Array | None]:
    """Return a side's arrays as the kernels take them."""
    if not isinstance(stored, Quantized):
        return stored, None
    if stored.format.has_centers:
        raise NotImplementedError(f"a cache of {stored.format.name}")
    return typed_codes(stored), stored.scales


def _cpu(
    q: jax.Array, k: Stored, v: Stored, *arrays: jax.Array, **options: Any
) -> Result:
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        raise NotImplementedError("a low-bit cache")
    if target_device().platform != "cpu":
        raise NotImplementedError(f"a device of platform {target_device().platform}")
    return cpu_kernels.paged_attention(q, k, v, *arrays, **options)


def _xla(
    q: jax.Array, k: Stored, v: Stored, *arrays: jax.Array, **options: Any
) -> Result:
    prepared = _prepared(q, k, v)
    return _restored(paged_attention_xla(prepared, k, v, *arrays, **options), q, v)


def _reference(
    q: jax.Array, k: Stored, v: Stored, *arrays: jax.Array, **options: Any
) -> Result:
    blocks = (decode(k), decode(v))
    prepared = _prepared(q, k, v)
    result = paged_attention_reference(prepared, *blocks, *arrays, **options)
    return _restored(result, q, v)


def _prepared(q: jax.Array, k: Stored, v: Stored) -> jax.Array:
    """Return queries for decoded keys; float32 if outputs are to be restored too."""
    if format_of(v).is_transformed:
        q = q.astype(jnp.float32)
    return prepare_queries(q, format_of(k))


def _restored(result: Result, q: jax.Array, v: Stored) -> Result:
    """Return outputs in q's dtype, made of sums of decoded values."""
    if isinstance(result, tuple):
        out, lse = result
        return restore_outputs(out, format_of(v)).astype(q.dtype), lse
    return restore_outputs(result, format_of(v)).astype(q.dtype)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "mosaic_gpu": _mosaic_gpu,
    "cpu": _cpu,
    "xla": _xla,
    "reference": _reference,
}
_AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "gpu": ("mosaic_gpu", "xla"),
    "cpu": ("cpu", "xla"),
}
_LOGGER = logging.getLogger(__name__)


@no_type_check  # it checks its own arguments, in tests and elsewhere
def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    cache: KVCache,
    layer: int,
    *,
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Result:
    """Attend from every query to its row's keys and values in the cache.

    This step's keys are read from the cache like all others, as they are stored: call
    `write_kv` first.
    Slots that no token was written to never matter, whatever they hold. Scores,
    softmax and accumulation are float32.

    Args:
        q: Queries after RoPE, the rows' one after another, padding last.
        cache: The cache, this step's keys and values included; only read.
        layer: Index of the layer.
        block_tables: Each row's blocks in order; tails are `NULL_BLOCK`.
        kv_lens: Tokens each row attends to, this step's included; 0 for padding rows.
        cu_q_lens: Row r's queries are q[cu_q_lens[r]:cu_q_lens[r + 1]]; rows of none
            are allowed.
        scale: Factor on the scores; None: 1 / sqrt(head_dim).
        window: Each query sees only its last `window` keys, its own included.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        return_lse: Return the scores' log-sum-exp too.
        implementation: `auto` takes the fastest that can do the case on the device
            compiled for, and logs once what one could not; a named one raises then.

    Returns:
        Outputs like q, and with `return_lse` the float32 [tokens, q_heads]
        log-sum-exp. A query that sees no key, and every token past cu_q_lens[-1],
        gets output 0 and log-sum-exp -inf.

    Raises:
        ValueError: Arguments that do not fit each other or the cache.
        NotImplementedError: The named implementation cannot do this case.
        ExceptionGroup: With `auto`, none can.
    """
    _check_arguments(q, cache, layer, block_tables, kv_lens, cu_q_lens)
    check_options(scale, window, soft_cap)
    k, v = cache.layers[layer]
    arguments = (q, k, v, block_tables, kv_lens, cu_q_lens)
    options = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "window": window,
        "soft_cap": soft_cap,
        "return_lse": return_lse,
    }
    return _first_that_can(implementation, arguments, options)


def _first_that_can(
    implementation: str, arguments: tuple, options: dict[str, Any]
) -> Result:
    if implementation != "auto":
        if implementation not in IMPLEMENTATIONS:
            allowed = ("auto", *IMPLEMENTATIONS)
            raise ValueError(
                f"implementation must be one of {allowed}, got {implementation!r}"
            )
        return IMPLEMENTATIONS[implementation](*arguments, **options)
    errors = []
    for name in _AUTO_ORDER.get(target_device().platform, ("xla",)):
        try:
            return IMPLEMENTATIONS[name](*arguments, **options)
        except NotImplementedError as error:
            _log_once(f"paged_attention: {name} cannot do this: {error}")
            errors.append(error)
    raise ExceptionGroup("no implementation of paged_attention can do this", errors)


@functools.cache
def _log_once(message: str) -> None:
    _LOGGER.warning(message)


def _check_arguments(
    q: jax.Array,
    cache: KVCache,
    layer: int,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> None:
    if not 0 <= layer < len(cache.layers):
        raise ValueError(
            f"layer {layer} is outside the cache's {len(cache.layers)} layers"
        )
    _, kv_heads, _, head_dim = vector_shape(cache.layers[layer].k)
    if q.ndim != 3 or q.shape[2] != head_dim:
        raise ValueError(
            f"q has shape {q.shape}, expected [tokens, q_heads, head_dim={head_dim}]"
        )
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, not a multiple of the cache's {kv_heads} "
            "kv_heads"
        )
    rows = block_tables.shape[0]
    for name, array, expected in (
        ("block_tables", block_tables, (rows, block_tables.shape[-1])),
        ("kv_lens", kv_lens, (rows,)),
        ("cu_q_lens", cu_q_lens, (rows + 1,)),
    ):
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}, expected {expected}")
        if array.dtype != "int32":
            raise ValueError(f"{name} must be int32, got {array.dtype}")
