"""Decoding from quantised keys and values, in Pallas' GPU interpreter."""

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention
from tests.helpers import Workload, dense_attention
from tests.pallas_kernels.low_bit import low_bit_case

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# Of values of size 1. Weights are rounded to 16 bits before they meet the values,
# values of int4 too, and so is the output.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}
LSE_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    interpreter.reset_gpu_interpret_mode_state()


SHORT = Workload(rows=((1, 1), (1, 16), (1, 17)), head_dim=64, block_size=16)
STRADDLING = Workload(
    rows=((1, 63), (1, 64), (1, 65)), q_heads=9, kv_heads=3, head_dim=64
)
LONG = Workload(
    rows=((1, 321), (0, 5), (1, 0)), kv_heads=1, head_dim=128, block_size=32
)
FEW_TOKENS = Workload(
    rows=((4, 130), (1, 65), (3, 3), (0, 7)), head_dim=64, padding_tokens=2
)
LARGE_BLOCKS = Workload(rows=((1, 200),), q_heads=18, head_dim=64, block_size=128)
# More tokens a row than decoding takes of plain keys.
MANY_TOKENS = Workload(
    rows=((11, 70), (1, 3)), head_dim=64, block_size=64, padding_rows=1
)
CASES = [
    ("int8", "int8", SHORT, "bfloat16", {}),
    ("int8", "int8", STRADDLING, "float16", {"soft_cap": 2.0}),
    ("int8", "int8", LONG, "bfloat16", {"window": 70}),
    ("int8", "int8", FEW_TOKENS, "bfloat16", {}),
    ("fp8_e4m3", "fp8_e4m3", LONG, "bfloat16", {}),
    ("fp8_e5m2", "fp8_e5m2", STRADDLING, "bfloat16", {"window": 1}),
    ("fp8_e4m3", "fp8_e4m3", FEW_TOKENS, "float16", {"soft_cap": 30.0, "window": 64}),
    ("fp8_e4m3_static", "fp8_e4m3_static", SHORT, "bfloat16", {"scale": 1e-3}),
    ("int8", "fp8_e4m3", LARGE_BLOCKS, "bfloat16", {"soft_cap": 30.0}),
    ("plain", "int8", STRADDLING, "bfloat16", {}),
    ("fp8_e5m2", "plain", SHORT, "bfloat16", {}),
    ("int8", "fp8_e5m2", MANY_TOKENS, "float16", {}),
    ("int4", "int4", SHORT, "bfloat16", {}),
    ("int4", "int4", LONG, "bfloat16", {"window": 70}),
    ("int4", "int4", FEW_TOKENS, "bfloat16", {"soft_cap": 30.0}),
    ("int8", "int4", STRADDLING, "bfloat16", {}),
    ("int4", "plain", MANY_TOKENS, "bfloat16", {}),
]


def check(k_format, v_format, workload, dtype, options, *, v_size=1.0):
    case, arrays = low_bit_case(
        workload, k_format, v_format, dtype=dtype, v_size=v_size
    )
    options = {"scale": workload.head_dim**-0.5} | options
    out, lse = paged_attention(
        **arrays, **options, return_lse=True, interpret=INTERPRET
    )
    assert out.dtype == dtype
    jax.block_until_ready((out, lse))
    assert not interpreter.get_races().races_found
    expected_out, expected_lse = dense_attention(case, **options)
    size = np.sqrt(np.mean(np.concatenate(case.values) ** 2))
    np.testing.assert_allclose(
        np.asarray(out, np.float64) / size,
        expected_out / size,
        atol=TOLERANCE[dtype],
        rtol=0,
    )
    np.testing.assert_allclose(lse, expected_lse, atol=LSE_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("k_format", "v_format", "workload", "dtype", "options"), CASES
)
def test_equals_dense_softmax_without_a_race(
    k_format, v_format, workload, dtype, options
):
    check(k_format, v_format, workload, dtype, options)


@pytest.mark.parametrize("v_size", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("v_format", ["int8", "fp8_e4m3", "fp8_e5m2", "int4"])
def test_values_of_any_size_keep_their_precision(v_format, v_size):
    check(v_format, v_format, SHORT, "bfloat16", {}, v_size=v_size)
