"""Strict JAX settings for every test; tests marked `gpu` need the device."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of XLA on the CPU. Pallas' GPU interpreter blocks one for each warpgroup, and
# with two has been seen to wait for ever.
os.environ.setdefault("NPROC", "4")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
