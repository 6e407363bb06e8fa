"""Merging attention over disjoint sets of keys by their log-sum-exps."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_partials(
    outs: Float[Array, "parts *rows head_dim"],
    lses: Float[Array, "parts *rows"],
) -> tuple[Float[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """Combine partial attention results into the result over all their keys.

    A part without keys has output 0 and log-sum-exp -inf; it contributes nothing,
    and parts that are all empty give output 0 and -inf again. See FlashDecoding
    (Dao et al., 2023).
    """
    top = jnp.max(lses, axis=0)
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - shift[None])
    total = jnp.sum(weights, axis=0)
    safe_total = jnp.where(total == 0.0, 1.0, total)
    out = jnp.sum(outs * weights[..., None].astype(outs.dtype), axis=0)
    lse = jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(safe_total))
    return out / safe_total[..., None].astype(outs.dtype), lse
