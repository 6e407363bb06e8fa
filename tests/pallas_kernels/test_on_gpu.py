"""The kernels on the GPU they are made for, against the reference in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_cases, kernels
from pallas_kernels import paged_attention, paged_attention_reference
from tests.helpers import Workload, random_paged_case
from tests.pallas_kernels.low_bit import low_bit_case

pytestmark = pytest.mark.gpu

LSE_TOLERANCE = 1e-4  # the GPU approximates exp2 and log2

DECODE = {
    "one key, blocks and tiles straddled": (
        Workload(
            rows=tuple((1, n) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)),
            q_heads=32,
            kv_heads=8,
            head_dim=128,
            block_size=16,
        ),
        "bfloat16",
        {},
    ),
    "splits of one long row, group of 8": (
        Workload(
            rows=((1, 4099),), q_heads=32, kv_heads=4, head_dim=128, block_size=16
        ),
        "float16",
        {},
    ),
    "empty rows and padding, group of 3": (
        Workload(
            rows=((0, 0), (1, 193), (0, 40), (1, 0), (1, 700)),
            q_heads=9,
            kv_heads=3,
            head_dim=64,
            block_size=8,
            padding_rows=3,
            padding_tokens=2,
        ),
        "bfloat16",
        {},
    ),
    "window and soft cap, group of 1": (
        Workload(
            rows=((1, 1000), (1, 64), (1, 65), (1, 3)),
            q_heads=8,
            kv_heads=8,
            head_dim=64,
            block_size=128,
        ),
        "float16",
        {"window": 65, "soft_cap": 5.0, "scale": 0.3},
    ),
    "head_dim 256, window of one key": (
        Workload(
            rows=((1, 300), (1, 1), (1, 128)),
            q_heads=16,
            kv_heads=4,
            head_dim=256,
            block_size=32,
        ),
        "bfloat16",
        {"window": 1},
    ),
    "head_dim 256, more rows than multiprocessors": (
        Workload(
            rows=tuple((1, 1 + 7 * n) for n in range(140)),
            q_heads=8,
            kv_heads=2,
            head_dim=256,
            block_size=64,
        ),
        "float16",
        {},
    ),
    "a row of several queries among many rows": (
        Workload(
            rows=((3, 130), (0, 0), (0, 64), (1, 2)),
            q_heads=24,
            kv_heads=8,
            head_dim=128,
            block_size=64,
        ),
        "bfloat16",
        {"soft_cap": 30.0},
    ),
}
PREFILL = {
    "a prompt of every length around a tile": (
        Workload(
            rows=tuple((n, n) for n in (31, 32, 33, 63, 64, 65)),
            q_heads=32,
            kv_heads=8,
            head_dim=128,
            block_size=16,
        ),
        "bfloat16",
        {},
    ),
    "previous context, empty rows and padding": (
        Workload(
            rows=((0, 0), (100, 433), (0, 77), (1, 500), (17, 1040)),
            q_heads=16,
            kv_heads=2,
            head_dim=128,
            block_size=8,
            padding_rows=2,
            padding_tokens=5,
        ),
        "float16",
        {},
    ),
    "window and soft cap, group of 3": (
        Workload(
            rows=((200, 300), (130, 130)),
            q_heads=9,
            kv_heads=3,
            head_dim=64,
            block_size=32,
        ),
        "bfloat16",
        {"window": 70, "soft_cap": 5.0, "scale": 0.3},
    ),
    "group of 1, window of one key": (
        Workload(
            rows=((129, 200), (2, 2)),
            q_heads=4,
            kv_heads=4,
            head_dim=64,
            block_size=64,
        ),
        "float16",
        {"window": 1},
    ),
    "few queries a row": (
        Workload(
            rows=((4, 900), (4, 4), (3, 65), (2, 64), (4, 131)),
            q_heads=32,
            kv_heads=4,
            head_dim=128,
            block_size=128,
        ),
        "bfloat16",
        {},
    ),
}
CASES = DECODE | PREFILL


def arguments_of(workload, dtype):
    case = random_paged_case(workload, dtype=dtype, unused=np.nan)
    layer = case.cache.layers[0]
    arrays = (case.block_tables, case.kv_lens, case.cu_q_lens)
    return (jnp.asarray(case.q, dtype), layer.k, layer.v, *map(jnp.asarray, arrays))


def check(workload, dtype, options):
    """Compare a kernel with the reference; the error is as the benchmark's."""
    options = {"scale": workload.head_dim**-0.5} | options
    arguments = arguments_of(workload, dtype)
    out, lse = paged_attention(*arguments, **options, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    q, *others = arguments
    with jax.default_matmul_precision("highest"):  # not TF32
        expected, expected_lse = paged_attention_reference(
            q.astype(jnp.float32), *others, **options, return_lse=True
        )
    np.testing.assert_allclose(lse, expected_lse, atol=LSE_TOLERANCE, rtol=0)
    sees = np.isfinite(np.asarray(expected_lse)).all(axis=1)
    assert not np.asarray(out, np.float32)[~sees].any()
    error = kernels.relative_error(out[sees], expected[sees])
    assert error < kernels.TOLERANCE[dtype]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    check(*CASES[name])


LOW_BIT_ROWS = tuple((1, n) for n in (1, 15, 16, 17, 63, 64, 65, 127, 129, 1000))


@pytest.mark.parametrize(
    ("k_format", "v_format"),
    [
        ("int8", "int8"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("fp8_e4m3_static", "fp8_e4m3_static"),
        ("int4", "int4"),
        ("int8", "int4"),
        ("plain", "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize(
    "workload",
    [
        Workload(LOW_BIT_ROWS, q_heads=32, kv_heads=8, head_dim=128, block_size=16),
        Workload(
            ((4, 900), (2, 64), (0, 77), (3, 3)),
            q_heads=9,
            kv_heads=3,
            head_dim=64,
            block_size=8,
            padding_rows=2,
            padding_tokens=3,
        ),
        Workload(((1, 4099),), q_heads=8, kv_heads=4, head_dim=256, block_size=32),
    ],
    ids=["d128", "few tokens, d64", "splits, d256"],
)
@pytest.mark.parametrize("v_size", [1.0, 2.0**40])
def test_low_bit_equals_the_reference(k_format, v_format, workload, v_size):
    _, arrays = low_bit_case(workload, k_format, v_format, v_size=v_size)
    scale = workload.head_dim**-0.5
    out, lse = paged_attention(**arrays, scale=scale, return_lse=True)
    with jax.default_matmul_precision("highest"):  # not TF32
        expected, expected_lse = paged_attention_reference(
            **(arrays | {"q": arrays["q"].astype(jnp.float32)}),
            scale=scale,
            return_lse=True,
        )
    np.testing.assert_allclose(lse, expected_lse, atol=LSE_TOLERANCE, rtol=0)
    sees = np.isfinite(np.asarray(expected_lse)).all(axis=1)
    assert not np.asarray(out, np.float32)[~sees].any()
    error = kernels.relative_error(out[sees], expected[sees])
    assert error < kernels.TOLERANCE["bfloat16"]


@pytest.mark.parametrize("head_dim", [80, 96, 112, 160, 192, 256])
@pytest.mark.parametrize("rows", [((1, 200), (1, 64)), ((70, 200),)], ids=str)
def test_other_head_dims_are_right_or_refused_by_name(rows, head_dim):
    workload = Workload(
        rows=rows, q_heads=8, kv_heads=2, head_dim=head_dim, block_size=16
    )
    message = None
    try:
        check(workload, "bfloat16", {})
    except NotImplementedError as refusal:
        message = str(refusal)
    assert message is None or f"head_dim {head_dim}" in message


@pytest.mark.parametrize(
    "name",
    [
        "decode-1x16384-kv8",
        "decode-64x8192-kv8",
        "decode-256x2048-kv4",
        "prefill-1x2048-kv8",
        "prefill-8x256-after4096-kv8",
        "mixed-63x4096-and-1x512-after2048-kv8",
        "few-64x4-after4096-kv4",
        "decode-64x8192-kv8-int8",
        "decode-64x8192-kv8-fp8_e4m3",
        "decode-64x8192-kv8-int4",
    ],
)
def test_equals_the_reference_at_real_shapes(name):
    case = kernel_cases.grid()[name]
    inputs = kernel_cases.make_inputs(case, seed=0, num_sets=1)
    out = paged_attention(*inputs.arguments(0), **inputs.scales, scale=case.scale)
    expected = kernels.expected_outputs(case, inputs, 0)
    assert kernels.relative_error(out, expected) < kernels.TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    "name",
    [
        "splits of one long row, group of 8",
        "empty rows and padding, group of 3",
        "previous context, empty rows and padding",
        "few queries a row",
    ],
)
def test_twenty_launches_give_the_same_bits(name):
    workload, dtype, options = CASES[name]
    arguments = arguments_of(workload, dtype)
    options = {"scale": workload.head_dim**-0.5, "return_lse": True} | options
    results = [paged_attention(*arguments, **options) for _ in range(20)]
    (out, lse), *others = jax.device_get(results)
    for other_out, other_lse in others:
        np.testing.assert_array_equal(out.view(np.uint16), other_out.view(np.uint16))
        np.testing.assert_array_equal(lse, other_lse)
