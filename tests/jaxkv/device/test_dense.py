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
    ("tokens", "dtype", "has_amx", "expected"),
    [
        (32, "bfloat16", True, True),
        (33, "bfloat16", True, False),
        (33, "bfloat16", False, True),
        (256, "float32", True, True),
        (4, "float16", False, False),
    ],
)
def test_many_bfloat16_tokens_go_to_xla_where_there_is_amx(
    tokens, dtype, has_amx, expected, monkeypatch
):
    monkeypatch.setattr(cpu_kernels, "has_amx", lambda: has_amx)
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
