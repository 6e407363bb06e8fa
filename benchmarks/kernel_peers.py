"""Implementations of paged attention that the kernel benchmark runs side by side.

Each takes a case's arrays in the layout of its own, converted before anything is timed.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.kernel_cases import Case, Inputs
from jaxkv.device.attention_xla import paged_attention_xla

_SPARE_BYTES = 2 * 2**30


class Prepared(NamedTuple):
    """A function ready to be timed.

    Attributes:
        setting: What was chosen, where an implementation leaves a choice; else "".
        function: Takes one of `arguments`.
        arguments: For each set of inputs.
        to_tokens: Turns its result into outputs [tokens, q_heads, head_dim].
    """

    setting: str
    function: Callable
    arguments: list[tuple]
    to_tokens: Callable[[Any], jax.Array]


def mosaic_gpu(case: Case, inputs: Inputs, interpret: Any) -> list[Prepared]:
    """Our kernels."""

    # Scales are arguments: a closure's arrays would be compiled in.
    def function(scales, *arguments):
        return pallas_kernels.paged_attention(
            *arguments, **scales, scale=case.scale, interpret=interpret
        )

    arguments = [(inputs.scales, *others) for others in _arguments(inputs)]
    return [Prepared("", function, arguments, lambda out: out)]


def xla(case: Case, inputs: Inputs, interpret: Any) -> list[Prepared]:
    """Our implementation in plain XLA.

    Raises:
        NotImplementedError: It cannot do this case.
    """
    _check_plain(case)
    function = functools.partial(paged_attention_xla, scale=case.scale)
    return [Prepared("", function, _arguments(inputs), lambda out: out)]


def jax_triton(case: Case, inputs: Inputs, interpret: Any) -> list[Prepared]:
    """JAX's own Pallas kernel, with the number of splits it defaults to and without.

    Raises:
        NotImplementedError: It cannot do this case.
    """
    _check_plain(case)
    if not case.is_decode:
        raise NotImplementedError("takes one query a row")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            r"jax\.experimental\.pallas\.ops\.gpu\.paged_attention is deprecated",
            DeprecationWarning,
        )
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    all_splits = [n for n in (16, 1) if _divides_evenly(case.width, n)]
    if not all_splits:
        raise NotImplementedError(f"does not split tables of {case.width} blocks")
    _check_room(inputs)
    k_blocks, v_blocks = (_heads_first(x) for x in (inputs.k_blocks, inputs.v_blocks))
    # It has no scale.
    arguments = [
        (_scaled(q, case.scale), k_blocks, v_blocks, tables, inputs.kv_lens)
        for q, tables in zip(inputs.q, inputs.block_tables, strict=True)
    ]
    return [
        Prepared(
            f"k_splits={k_splits}",
            functools.partial(
                paged_attention, k_splits=k_splits, interpret=interpret is not None
            ),
            arguments,
            lambda out: out,
        )
        for k_splits in all_splits
    ]


def cudnn(case: Case, inputs: Inputs, interpret: Any) -> list[Prepared]:
    """CuDNN's paged attention, by the operation that JAX keeps to itself.

    Raises:
        NotImplementedError: It cannot do this case.
    """
    _check_plain(case)
    if interpret is not None:
        raise NotImplementedError("has no interpreter")
    if len(set(case.rows)) > 1:
        raise NotImplementedError("takes rows of one length, by its shapes")
    q_len, kv_len = case.rows[0]
    if q_len not in (1, kv_len):
        raise NotImplementedError("its causal mask leaves no room for previous context")
    from jax._src.cudnn import fused_attention_stablehlo as op

    # It wants a pool of just the blocks that one call reads.
    num_taken = len(case.rows) * case.width
    _check_room(inputs)
    lens = [jnp.full(len(case.rows), n, jnp.int32) for n in (q_len, kv_len)]
    arguments = []
    for index, (q, tables) in enumerate(
        zip(inputs.q, inputs.block_tables, strict=True)
    ):
        start = 1 + index * num_taken
        pools = (
            x[start : start + num_taken] for x in (inputs.k_blocks, inputs.v_blocks)
        )
        tables = (tables - start)[:, None, :, None]
        q = q.reshape(len(case.rows), q_len, *q.shape[1:]).swapaxes(1, 2)
        arguments.append((q, *pools, *lens, tables, tables))
    mask_type = op.MaskType.PADDING if q_len == 1 else op.MaskType.PADDING_CAUSAL
    function = functools.partial(
        op.paged_attention, scale=case.scale, mask_type=mask_type, qkv_layout="BNTH"
    )
    shape = (case.tokens, case.q_heads, case.head_dim)
    return [
        Prepared(
            "",
            jax.jit(function),
            arguments,
            lambda out: out.swapaxes(1, 2).reshape(shape),
        )
    ]


OURS = "mosaic_gpu"
IMPLEMENTATIONS = {
    OURS: mosaic_gpu,
    "xla": xla,
    "jax_triton": jax_triton,
    "cudnn": cudnn,
}
"""All of them by name; each takes (case, inputs, interpret parameters or None)."""


def _arguments(inputs: Inputs) -> list[tuple]:
    return [inputs.arguments(index) for index in range(len(inputs.q))]


def _check_plain(case: Case) -> None:
    """Check that keys and values are not quantised.

    Raises:
        NotImplementedError: They are.
    """
    if case.kv_format != "plain":
        raise NotImplementedError(f"is not given {case.kv_format} keys and values here")


def _divides_evenly(width: int, num_splits: int) -> bool:
    """Whether splits are of like size, and in units of 8 blocks if longer."""
    size, rest = divmod(width, num_splits)
    return size > 0 and rest == 0 and size % min(size, 8) == 0


def _check_room(inputs: Inputs) -> None:
    """Check that the device has room for a second pool.

    Raises:
        NotImplementedError: It has not.
    """
    stats = jax.devices()[0].memory_stats()
    if stats is None or "bytes_limit" not in stats:  # a CPU
        return
    needed = inputs.k_blocks.nbytes + inputs.v_blocks.nbytes + _SPARE_BYTES
    room = stats["bytes_limit"] - stats["bytes_in_use"]
    if needed > room:
        raise NotImplementedError(
            f"wants a pool of its own, {needed / 1e9:.0f} GB, and {room / 1e9:.0f} "
            "GB are left"
        )


@jax.jit
def _heads_first(blocks: jax.Array) -> jax.Array:
    return blocks.swapaxes(0, 1)


@jax.jit
def _scaled(q: jax.Array, scale: float) -> jax.Array:
    return (q.astype(jnp.float32) * scale).astype(q.dtype)
