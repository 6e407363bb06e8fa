"""Products, norms and gates of tokens: picks an implementation, as `attention` does.

On a CPU those of `cpu_kernels`, where there is one for the dtype. What a token gets of
them does not depend, to the last bit, on the tokens that are computed beside it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

import cpu_kernels
from pallas_kernels import target_device

_LOGGER = logging.getLogger(__name__)


def skips_padding(dtype: str) -> bool:
    """Whether products of padding, which is zeros, are not computed."""
    if target_device().platform != "cpu":
        return False
    return cpu_kernels.is_available(dtype)


def multiply(
    x: Float[Array, "tokens in_dim"],
    *weights: Float[Array, "_ in_dim"],
    result_dtype: str | None = None,
) -> tuple[jax.Array, ...]:
    """Return x @ weight.T for each weight; sums are float32.

    Args:
        x: One row per token.
        *weights: As checkpoints have them; their out_dims may differ.
        result_dtype: None: x's.
    """
    implementation = _first_that_can(
        cpu_kernels.multiply, cpu_kernels.multiply_reference
    )
    return implementation(x, *weights, result_dtype=result_dtype)


def rms_norm(
    x: Float[Array, "*vectors dim"], weight: Float[Array, " dim"], *, eps: float
) -> Float[Array, "*vectors dim"]:
    """Normalise in float32 (Zhang & Sennrich, 2019), scale in x's dtype."""
    implementation = _first_that_can(
        cpu_kernels.rms_norm, cpu_kernels.rms_norm_reference
    )
    return implementation(x, weight, eps=eps)


def swiglu(
    gate: Float[Array, "tokens dim"], up: Float[Array, "tokens dim"]
) -> Float[Array, "tokens dim"]:
    """Return silu(gate) * up (Shazeer, 2020)."""
    implementation = _first_that_can(cpu_kernels.swiglu, cpu_kernels.swiglu_reference)
    return implementation(gate, up)


def _first_that_can(
    on_cpu: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    if target_device().platform != "cpu":
        return reference

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return on_cpu(*arguments, **options)
        except NotImplementedError as error:
            _log_once(f"cpu_kernels cannot do this, but XLA can: {error}")
            return reference(*arguments, **options)

    return call


@functools.cache
def _log_once(message: str) -> None:
    _LOGGER.warning(message)
