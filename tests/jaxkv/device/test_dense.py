import jax
import jax.numpy as jnp
import pytest

import cpu_kernels
from jaxkv.device.dense import multiply, skips_padding

needs_kernels = pytest.mark.skipif(
    not cpu_kernels.is_available("float32"),
    reason="no CPU kernels for this machine, or not compiled",
)


def calls_kernel(tokens, dtype):
    x, w = jnp.ones((tokens, 16), dtype), jnp.ones((3, 16), dtype)
    fresh = jax.jit(lambda x, w: multiply(x, w))  # traced anew each time
    return "jaxkv_multiply" in fresh.lower(x, w).as_text()


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "dtype", "expected"),
    [
        (1, "bfloat16", True),
        (256, "bfloat16", True),
        (256, "float32", True),
        (4, "float16", False),
    ],
)
def test_kernels_multiply_any_number_of_tokens_in_their_dtypes(tokens, dtype, expected):
    assert calls_kernel(tokens, dtype) == expected


@needs_kernels
def test_padding_is_skipped_in_the_kernels_dtypes_only():
    assert [skips_padding(d) for d in ("float32", "bfloat16", "float16")] == [
        True,
        True,
        False,
    ]


def test_without_kernels_padding_is_computed(monkeypatch):
    def load(instruction_set=None):
        raise NotImplementedError

    monkeypatch.setattr("cpu_kernels.entry.load", load)
    assert not skips_padding("float32")
