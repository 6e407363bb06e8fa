"""The entry point to the GPU kernels: which one can do this case, if any.

A kernel raises `NotImplementedError` for a case it cannot do, and only for that.
"""

import jax
from jaxtyping import Array, Float, Int32


def paged_attention_mosaic_gpu(
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
) -> tuple[jax.Array, jax.Array]:
    """Run ragged paged attention with a Pallas Mosaic GPU kernel.

    Raises:
        NotImplementedError: Always, so far: no kernel has landed yet.
    """
    del q, k_blocks, v_blocks, block_tables, kv_lens, cu_q_lens
    del scale, window, soft_cap
    raise NotImplementedError("no Mosaic GPU paged attention kernel has landed yet")
