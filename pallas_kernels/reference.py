"""Ragged paged attention written for reading: gathers everything, no tiles, no loops.

Every other implementation is compared with this one, and this one with a dense
softmax in float64.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped


def paged_attention_reference(
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
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Attend from each token to its row's keys at or before its own position.

    Memory grows with tokens * width * block_size: for tests and small shapes. Keys and
    values may be quantised, as `paged_attention` takes them.

    Returns:
        The outputs in q's dtype, and with `return_lse` the float32 log-sum-exp of the
        scores.
    """
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_blocks.shape
    width = block_tables.shape[1]
    keys = width * block_size

    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    is_real = token < cu_q_lens[-1]
    row = jnp.where(is_real, row, 0)
    # Query i of a row lies at position kv_len - q_len + i.
    position = kv_lens[row] - cu_q_lens[row + 1] + token

    key = jnp.arange(keys, dtype=jnp.int32)[None, :]
    visible = is_real[:, None] & (key <= position[:, None])
    if window is not None:
        visible &= key > position[:, None] - window

    def gather(blocks: jax.Array, scales: jax.Array | None) -> jax.Array:
        tables = block_tables[row]
        mine = dequantised(blocks[tables], None if scales is None else scales[tables])
        flat = mine.swapaxes(2, 3)  # [tokens, width, block_size, heads, dim]
        flat = flat.reshape(tokens, keys, kv_heads, head_dim)
        # Slots that hold nothing may hold NaN, and 0 * NaN is NaN.
        return jnp.where(visible[:, :, None, None], flat, 0.0)

    grouped = q.astype(jnp.float32).reshape(tokens, kv_heads, -1, head_dim)
    scores = jnp.einsum("thgd,tkhd->thgk", grouped, gather(k_blocks, k_scales)) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    shift = jnp.where(jnp.isneginf(lse), 0.0, lse)
    weights = jnp.exp(scores - shift[..., None])
    out = jnp.einsum("thgk,tkhd->thgd", weights, gather(v_blocks, v_scales))
    out = out.reshape(q.shape).astype(q.dtype)
    return (out, lse.reshape(tokens, q_heads)) if return_lse else out


def dequantised(
    codes: Shaped[Array, "*slots _"], scales: Float[Array, "*slots_and_groups"] | None
) -> Float[Array, "*slots head_dim"]:
    """Return the vectors that codes stand for; plain ones are their own."""
    if codes.dtype == jnp.uint8:  # two codes of 4 bits, -8 to 7
        halves = jnp.stack([codes << 4, codes], axis=-1)
        codes = jax.lax.bitcast_convert_type(halves, jnp.int8) >> 4
        codes = codes.reshape(*codes.shape[:-2], -1)
    vectors = codes.astype(jnp.float32)
    if scales is None:
        return vectors
    scales = scales.astype(jnp.float32).reshape(*codes.shape[:-1], -1)  # of each group
    elements = codes.shape[-1] // scales.shape[-1]
    return vectors * jnp.repeat(scales, elements, axis=-1)
