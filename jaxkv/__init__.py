"""A paged KV cache for JAX."""
