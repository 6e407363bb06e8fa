"""The kernels as functions of JAX arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from cpu_kernels.library import load

_DTYPES = ("float32", "bfloat16")


def is_available(dtype: str) -> bool:
    """Whether this machine has kernels for arrays of a dtype, and they load."""
    try:
        load()
    except NotImplementedError:
        return False
    return dtype in _DTYPES


def _check_dtypes(*arrays: jax.Array) -> None:
    """Check that arrays are of one dtype that there are kernels for.

    Raises:
        NotImplementedError: They are not.
    """
    for array in arrays:
        if array.dtype not in _DTYPES:
            raise NotImplementedError(f"arrays of {array.dtype}")
    if len({array.dtype for array in arrays}) > 1:
        raise NotImplementedError("arrays of different dtypes")


def multiply(
    x: Float[Array, "tokens in_dim"],
    *weights: Float[Array, "_ in_dim"],
    result_dtype: str | None = None,
    instruction_set: str | None = None,
) -> tuple[jax.Array, ...]:
    """Return x @ w.T for each weight, in one call; sums are float32.

    A token's results depend on nothing but itself and the weight, to the last bit: not
    on how many tokens there are. Tokens of zeros behind all others cost nothing: their
    results are zeros, whatever the weights hold.

    Args:
        x: float32 or bfloat16.
        *weights: Of x's dtype; their out_dims may differ.
        result_dtype: float32 or bfloat16; None: x's.
        instruction_set: One of `INSTRUCTION_SETS`; None: the fastest there is.

    Raises:
        NotImplementedError: Other dtypes, or no kernels for this machine.
    """
    result_dtype = str(x.dtype if result_dtype is None else result_dtype)
    _check_dtypes(x, *weights)
    if result_dtype not in _DTYPES:
        raise NotImplementedError(f"arrays of {result_dtype}")
    return _multiply(result_dtype, load(instruction_set), x, weights)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _multiply(
    result_dtype: str,
    instruction_set: str,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    call = jax.ffi.ffi_call(
        f"jaxkv_multiply_{instruction_set}",
        [jax.ShapeDtypeStruct((len(x), len(w)), result_dtype) for w in weights],
        vmap_method="sequential",
    )
    return tuple(call(x, *weights))


@_multiply.defjvp
def _multiply_jvp(result_dtype, instruction_set, primals, tangents):
    def products(x, weights):
        return multiply_reference(x, *weights, result_dtype=result_dtype)

    _, out_tangents = jax.jvp(products, primals, tangents)
    return _multiply(result_dtype, instruction_set, *primals), out_tangents


def multiply_reference(
    x: Float[Array, "tokens in_dim"],
    *weights: Float[Array, "_ in_dim"],
    result_dtype: str | None = None,
) -> tuple[jax.Array, ...]:
    """Return what `multiply` returns, by XLA's products, for all dtypes."""
    return tuple(
        lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=result_dtype
        )
        for w in weights
    )


def rms_norm(
    x: Float[Array, "*vectors dim"],
    weight: Float[Array, " dim"],
    *,
    eps: float,
    instruction_set: str | None = None,
) -> Float[Array, "*vectors dim"]:
    """Normalise in float32, round to x's dtype, then multiply with the weight.

    A vector's result depends on nothing but itself and the weight, to the last bit;
    XLA adds the squares in an order that depends on how many vectors there are.

    Raises:
        NotImplementedError: Other dtypes than float32 and bfloat16, two of them, or no
            kernels for this machine.
    """
    _check_dtypes(x, weight)
    return _rms_norm(eps, load(instruction_set), x, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rms_norm(
    eps: float, instruction_set: str, x: jax.Array, weight: jax.Array
) -> jax.Array:
    vectors = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(
        f"jaxkv_normalize_{instruction_set}",
        jax.ShapeDtypeStruct(vectors.shape, x.dtype),
        vmap_method="sequential",
    )
    return call(vectors, weight, eps=np.float32(eps)).reshape(x.shape)


@_rms_norm.defjvp
def _rms_norm_jvp(eps, instruction_set, primals, tangents):
    _, out_tangent = jax.jvp(
        functools.partial(rms_norm_reference, eps=eps), primals, tangents
    )
    return _rms_norm(eps, instruction_set, *primals), out_tangent


def rms_norm_reference(
    x: Float[Array, "*vectors dim"], weight: Float[Array, " dim"], *, eps: float
) -> Float[Array, "*vectors dim"]:
    """Return what `rms_norm` returns, by JAX's own operations, for all dtypes."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def swiglu(
    gate: Float[Array, "*vectors dim"],
    up: Float[Array, "*vectors dim"],
    *,
    instruction_set: str | None = None,
) -> Float[Array, "*vectors dim"]:
    """Return silu(gate) * up (Shazeer, 2020), in float32 and rounded once.

    Raises:
        NotImplementedError: Other dtypes than float32 and bfloat16, two of them, or no
            kernels for this machine.
    """
    _check_dtypes(gate, up)
    return _swiglu(load(instruction_set), gate, up)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _swiglu(instruction_set: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    call = jax.ffi.ffi_call(
        f"jaxkv_gate_{instruction_set}",
        jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        vmap_method="broadcast_all",
    )
    return call(gate, up)


@_swiglu.defjvp
def _swiglu_jvp(instruction_set, primals, tangents):
    _, out_tangent = jax.jvp(swiglu_reference, primals, tangents)
    return _swiglu(instruction_set, *primals), out_tangent


def swiglu_reference(
    gate: Float[Array, "*vectors dim"], up: Float[Array, "*vectors dim"]
) -> Float[Array, "*vectors dim"]:
    """Return what `swiglu` returns, by JAX's own operations, for all dtypes."""
    return jax.nn.silu(gate) * up


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "num_blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "rows width"],
    kv_lens: Int32[Array, " rows"],
    cu_q_lens: Int32[Array, " rows+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    instruction_set: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attend as `paged_attention` of `jaxkv` says; see there for the arguments.

    Keys and values are read where they lie, once for all queries of a row and KV head
    that are computed together. Scores and sums are float32. If keys and values are
    finite, a query's output depends on nothing but itself and its own of them, to the
    last bit: not on other queries or rows. One that is not finite may show in queries
    of its row that do not see it.

    Returns:
        The outputs in q's dtype, and with `return_lse` the float32 log-sum-exp.

    Raises:
        NotImplementedError: Other dtypes than float32 and bfloat16, or no kernels for
            this machine.
    """
    for array in (q, k_blocks, v_blocks):
        if array.dtype not in _DTYPES:
            raise NotImplementedError(f"attention over {array.dtype}")
    if k_blocks.dtype != v_blocks.dtype:
        raise NotImplementedError("keys and values of different dtypes")
    call = jax.ffi.ffi_call(
        f"jaxkv_attend_{load(instruction_set)}",
        [
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ],
        vmap_method="sequential",
    )
    out, lse = call(
        q,
        k_blocks,
        v_blocks,
        block_tables,
        kv_lens,
        cu_q_lens,
        scale=np.float32(scale),
        window=np.int64(0 if window is None else window),
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
    )
    return (out, lse) if return_lse else out
