"""Which row each token of a ragged batch belongs to."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def row_of_token(
    tokens: int, cu_q_lens: Int32[Array, " offsets"]
) -> tuple[Int32[Array, " tokens"], Bool[Array, " tokens"]]:
    """Return each token's row, and whether it is a token; padding gets the last row."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    return jnp.minimum(row, len(cu_q_lens) - 2), token < cu_q_lens[-1]
