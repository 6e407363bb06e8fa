"""Products of tokens with weights: picks an implementation, as `attention` does."""

import functools
import logging

import jax
from jax import lax
from jaxtyping import Array, Float

import cpu_kernels
from pallas_kernels import target_device

_LOGGER = logging.getLogger(__name__)


def multiply(
    x: Float[Array, "tokens in_dim"],
    *weights: Float[Array, "_ in_dim"],
    result_dtype: str | None = None,
) -> tuple[jax.Array, ...]:
    """Return x @ weight.T for each weight; sums are float32.

    On a CPU one call of `cpu_kernels` where there is one for the dtype, and then a
    token's results do not depend on how many tokens there are; else XLA's products.

    Args:
        x: One row per token.
        *weights: As checkpoints have them; their out_dims may differ.
        result_dtype: None: x's.
    """
    if target_device().platform == "cpu":
        try:
            return cpu_kernels.multiply(x, *weights, result_dtype=result_dtype)
        except NotImplementedError as error:
            _log_once(f"products: cpu_kernels cannot do this: {error}")
    return tuple(
        lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=result_dtype
        )
        for w in weights
    )


@functools.cache
def _log_once(message: str) -> None:
    _LOGGER.warning(message)
