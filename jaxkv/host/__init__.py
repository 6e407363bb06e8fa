"""Decisions: requests, blocks, scheduling. Never imports jax."""
