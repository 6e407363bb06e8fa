import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cpu_kernels
from jaxkv import KVCache, LayerKV, paged_attention, write_kv
from jaxkv.device import attention as attention_module
from pallas_kernels import target
from tests.helpers import (
    TOLERANCE,
    Workload,
    dense_attention,
    low_bit_paged_case,
    random_paged_case,
)
from tests.low_bit import LOW_BIT, MIXED

# Lengths straddle blocks (8), query tiles (32) and key tiles (64 and 128).
WORKLOADS = [
    Workload(rows=((1, 1),)),
    Workload(rows=((1, 8), (1, 7), (1, 9))),
    Workload(rows=((5, 5), (1, 3), (2, 17))),
    Workload(rows=((1, 127), (1, 128), (1, 129), (1, 260))),
    Workload(rows=((31, 31), (32, 32), (33, 33), (65, 130))),
    Workload(rows=((40, 40), (1, 128), (0, 0), (3, 129), (1, 5))),
    Workload(rows=((7, 20), (1, 20)), padding_rows=2, padding_tokens=7),
    Workload(rows=((20, 131),), q_heads=9, kv_heads=3, head_dim=64, block_size=16),
    Workload(rows=((1, 33), (6, 9)), q_heads=2, kv_heads=2, head_dim=80),
    Workload(rows=((9, 9), (1, 6)), q_heads=8, kv_heads=1, head_dim=6, block_size=1),
]
LOW_BIT_IMPLEMENTATIONS = ["xla", "reference"]
IMPLEMENTATIONS = [
    *LOW_BIT_IMPLEMENTATIONS,
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not cpu_kernels.supported_instruction_sets(),
            reason="no kernels for this machine, or none compiled",
        ),
    ),
]


def run(case, implementation="xla", **options):
    call = jax.jit(
        functools.partial(
            paged_attention,
            layer=0,
            return_lse=True,
            implementation=implementation,
            **options,
        )
    )
    out, lse = call(jnp.asarray(case.q), case.cache, **case.arguments())
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_equals_dense_softmax_and_ignores_what_unused_slots_hold(
    workload, implementation
):
    case = random_paged_case(workload, unused=np.nan)
    out, lse = run(case, implementation)
    expected_out, expected_lse = dense_attention(case)
    np.testing.assert_allclose(out, expected_out, atol=TOLERANCE["float32"], rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE["float32"], rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unused", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_len", [1, 7, 8, 9])
def test_a_pool_of_nan_or_inf_gives_the_bits_of_a_pool_of_zeros(
    kv_len, unused, implementation
):
    workload = Workload(rows=((1, kv_len), (min(3, kv_len), kv_len)))
    dirty, _ = run(random_paged_case(workload, unused=unused), implementation)
    clean, _ = run(random_paged_case(workload, unused=0.0), implementation)
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_caches_are_read_as_stored(dtype, implementation):
    case = random_paged_case(WORKLOADS[4], dtype=dtype)
    if (dtype, implementation) == ("float16", "cpu"):
        with pytest.raises(NotImplementedError, match="attention over float16"):
            run(case, implementation)
        return
    out, _ = run(case, implementation)
    # The keys in the case are already rounded, so float32's tolerance holds.
    expected, _ = dense_attention(case)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"], rtol=0)


LOW_BIT_WORKLOADS = [
    Workload(rows=((1, 127), (1, 1), (1, 129), (0, 0), (1, 64)), head_dim=64),
    Workload(rows=((40, 40), (1, 65), (3, 129), (1, 5)), head_dim=80, padding_tokens=3),
    Workload(rows=((33, 70), (2, 9)), q_heads=6, kv_heads=2, head_dim=96),
]
LARGEST_VALUE = 40.0
"""About the largest value in such a case; outputs are as large."""


@pytest.mark.parametrize("workload", LOW_BIT_WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("kv_cache_dtype", [*LOW_BIT, *MIXED])
def test_low_bit_caches_are_read_as_stored(kv_cache_dtype, workload):
    check_low_bit(low_bit_paged_case(workload, kv_cache_dtype), "xla")


@pytest.mark.parametrize("kv_cache_dtype", [*LOW_BIT, *MIXED])
def test_the_reference_reads_low_bit_caches_too(kv_cache_dtype):
    check_low_bit(low_bit_paged_case(LOW_BIT_WORKLOADS[2], kv_cache_dtype), "reference")


@pytest.mark.parametrize("implementation", LOW_BIT_IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_cache_dtype", ["int4", "int4_asymmetric:int8"])
def test_rotated_keys_and_values_are_read_as_stored(kv_cache_dtype, implementation):
    case = low_bit_paged_case(LOW_BIT_WORKLOADS[2], kv_cache_dtype, rotation=True)
    check_low_bit(case, implementation)


def check_low_bit(case, implementation):
    out, lse = run(case, implementation)
    expected_out, expected_lse = dense_attention(case)
    atol = LARGEST_VALUE * TOLERANCE["float32"]
    np.testing.assert_allclose(out, expected_out, atol=atol, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=atol, rtol=0)


@pytest.mark.parametrize("implementation", LOW_BIT_IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "rotation"),
    [("fp8_e4m3_static", False), ("int8:fp8_e5m2_static", False), ("int4", True)],
)
def test_queries_are_rotated_and_scaled_in_float32(
    kv_cache_dtype, rotation, dtype, implementation
):
    """0.02 and 0.03 are no 16-bit floats: the log-sum-exp would show it."""
    workload = Workload(rows=((1, 65), (4, 9)), head_dim=64)
    case = low_bit_paged_case(workload, kv_cache_dtype, rotation=rotation)
    case = dataclasses.replace(case, q=np.asarray(jnp.asarray(case.q, dtype)))
    out, lse = run(case, implementation)
    assert out.dtype == dtype
    exact = dataclasses.replace(case, q=case.q.astype(np.float32))
    expected_out, expected_lse = dense_attention(exact)
    np.testing.assert_allclose(lse, expected_lse, atol=LARGEST_VALUE * 2e-5, rtol=0)
    half_an_ulp = float(jnp.finfo(dtype).eps) / 2
    error = np.abs(out.astype(np.float32) - expected_out)
    assert (error <= 1.01 * half_an_ulp * np.abs(expected_out) + 1e-4).all()


def test_rotated_float16_does_not_overflow():
    """A rotated vector of equal elements has one that is 8 times as large."""
    workload = Workload(rows=((1, 3),), head_dim=64)
    case = low_bit_paged_case(workload, "int4", rotation=True)
    values = jnp.full((3, 2, 64), 3e4, jnp.float16)
    slots = jnp.asarray(case.block_tables[0, 0] * 8 + np.arange(3), jnp.int32)
    cache = write_kv(case.cache, 0, values * 1e-5, values, slots)
    case = dataclasses.replace(
        case, cache=cache, q=np.full((1, 4, 64), 3e4, np.float16)
    )
    out, lse = run(case)
    np.testing.assert_allclose(out.astype(np.float32), 3e4, rtol=0.03)
    np.testing.assert_allclose(lse, 3e4 * 0.3 * 64 / 8 + np.log(3), rtol=0.03)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "rotation"),
    [("int8", False), ("fp8_e4m3_static:fp8_e5m2", False), ("int4", True)],
)
def test_low_bit_caches_as_the_gpu_kernel_reads_them(
    kv_cache_dtype, rotation, monkeypatch
):
    monkeypatch.setattr(
        attention_module,
        "paged_attention_mosaic_gpu",
        functools.partial(
            attention_module.paged_attention_mosaic_gpu,
            interpret=plgpu.InterpretGPUParams(),
        ),
    )
    workload = Workload(rows=((1, 65), (1, 3)), head_dim=64, block_size=16)
    case = low_bit_paged_case(workload, kv_cache_dtype, rotation=rotation)
    case = dataclasses.replace(case, q=case.q.astype(jnp.bfloat16))
    out, lse = run(case, "mosaic_gpu")
    expected_out, expected_lse = dense_attention(case)
    # Values are as large as 40, of size 4 on average, and rounded on their way.
    atol = 4 * TOLERANCE["bfloat16"]
    np.testing.assert_allclose(out.astype(np.float32), expected_out, atol=atol, rtol=0)
    # A query is rounded once more where it is rotated or scaled.
    np.testing.assert_allclose(lse, expected_lse, rtol=2**-8, atol=2**-8)


def test_formats_that_no_kernel_reads_are_named():
    case = low_bit_paged_case(LOW_BIT_WORKLOADS[0], "int4_asymmetric")
    with pytest.raises(NotImplementedError, match="a cache of int4_asymmetric"):
        run(case, "mosaic_gpu")


@pytest.mark.parametrize("unused", [np.nan, np.inf])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4_asymmetric"])
def test_scales_of_unused_slots_do_not_matter(kv_cache_dtype, unused):
    workload = Workload(rows=((1, 9), (3, 7)), head_dim=80)
    dirty, _ = run(low_bit_paged_case(workload, kv_cache_dtype, unused=unused))
    clean, _ = run(low_bit_paged_case(workload, kv_cache_dtype, unused=1.0))
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 4, 130, 1000])
def test_a_window_sees_its_last_keys_only(window, implementation):
    case = random_paged_case(Workload(rows=((13, 13), (1, 9), (40, 300), (1, 290))))
    out, lse = run(case, implementation, window=window)
    expected_out, expected_lse = dense_attention(case, window=window)
    np.testing.assert_allclose(out, expected_out, atol=TOLERANCE["float32"], rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE["float32"], rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scale_and_soft_cap_act_on_the_scores(implementation):
    case = random_paged_case(WORKLOADS[2])
    out, _ = run(case, implementation, scale=0.7, soft_cap=1.5)
    expected, _ = dense_attention(case, scale=0.7, soft_cap=1.5)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"], rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_rows_and_padding_give_zero_and_minus_infinity(implementation):
    workload = Workload(rows=((0, 0), (1, 5), (0, 0)), padding_tokens=3)
    out, lse = run(random_paged_case(workload), implementation)
    np.testing.assert_array_equal(out[1:], 0.0)
    np.testing.assert_array_equal(lse[1:], -np.inf)
    assert np.isfinite(lse[0]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_of_a_row_without_keys_gives_zero(implementation):
    case = random_paged_case(Workload(rows=((1, 0), (1, 5), (1, 0))))
    out, lse = run(case, implementation)
    np.testing.assert_array_equal(out[[0, 2]], 0.0)
    np.testing.assert_array_equal(lse[[0, 2]], -np.inf)
    expected, _ = dense_attention(case)
    np.testing.assert_allclose(out[1], expected[1], atol=TOLERANCE["float32"], rtol=0)


def plant(case, fault):
    """Return a case that a wrong kernel would seem to have been given."""
    layer = case.cache.layers[0]
    if fault == "keys for values":
        cache = KVCache(layers=(LayerKV(k=layer.k, v=layer.k),))
        return case.q, cache, case.arguments()
    changed = case.arguments()
    if fault == "last key left out":
        changed["kv_lens"] = jnp.maximum(changed["kv_lens"] - 1, 1)
    elif fault == "two blocks swapped":
        tables = np.array(case.block_tables)
        tables[:, [0, 1]] = tables[:, [1, 0]]
        changed["block_tables"] = jnp.asarray(tables)
    return case.q, case.cache, changed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "fault", ["keys for values", "last key left out", "two blocks swapped"]
)
def test_the_comparison_sees(fault, implementation):
    case = random_paged_case(Workload(rows=((1, 12), (4, 21))), unused=0.0)
    q, cache, arguments = plant(case, fault)
    out = paged_attention(
        jnp.asarray(q), cache, 0, implementation=implementation, **arguments
    )
    expected, _ = dense_attention(case)
    assert np.abs(np.asarray(out) - expected).max() > 100 * TOLERANCE["float32"]


def test_arguments_that_do_not_fit_are_named():
    case = random_paged_case(Workload(rows=((1, 5), (2, 9))))
    q, arguments = jnp.asarray(case.q), case.arguments()

    def attend(q=q, layer=0, **changes):
        return paged_attention(q, case.cache, layer, **(arguments | changes))

    with pytest.raises(ValueError, match="layer 1 is outside the cache's 1 layers"):
        attend(layer=1)
    with pytest.raises(ValueError, match=r"q has shape \(3, 4, 8\).*head_dim=16"):
        attend(q=q[:, :, :8])
    with pytest.raises(ValueError, match=r"q has 3 heads, not a multiple of .* 2"):
        attend(q=q[:, :3])
    with pytest.raises(ValueError, match=r"window must be in \[1, 2\*\*31\)"):
        attend(window=0)
    with pytest.raises(ValueError, match="soft_cap must be a finite number > 0"):
        attend(soft_cap=0.0)
    with pytest.raises(ValueError, match="implementation must be one of"):
        attend(implementation="triton")


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H200"
    compute_capability = "9.0"


def test_a_named_implementation_that_cannot_raises_and_auto_goes_on(
    monkeypatch, caplog
):
    case = random_paged_case(Workload(rows=((1, 5),)))
    q, arguments = jnp.asarray(case.q), case.arguments()
    monkeypatch.setattr(attention_module, "target_device", lambda: Gpu)
    monkeypatch.setattr(target, "target_device", lambda: Gpu)
    with pytest.raises(NotImplementedError, match="queries of float32"):
        paged_attention(q, case.cache, 0, implementation="mosaic_gpu", **arguments)
    for _ in range(2):
        out = paged_attention(q, case.cache, 0, **arguments)
    np.testing.assert_allclose(
        out, dense_attention(case)[0], atol=TOLERANCE["float32"], rtol=0
    )
    assert [record.getMessage() for record in caplog.records] == [
        "paged_attention: mosaic_gpu cannot do this: queries of float32: only bfloat16 "
        "and float16"
    ]
    monkeypatch.setattr(attention_module, "_AUTO_ORDER", {"gpu": ("mosaic_gpu",)})
    with pytest.raises(ExceptionGroup, match="no implementation") as caught:
        paged_attention(q, case.cache, 0, **arguments)
    assert re.search("queries of float32", str(caught.value.exceptions[0]))


def test_a_kernel_named_on_a_device_it_does_not_know_raises(monkeypatch):
    case = random_paged_case(Workload(rows=((1, 5),)))
    q, arguments = jnp.asarray(case.q), case.arguments()
    with pytest.raises(NotImplementedError, match="kind cpu: only NVIDIA Hopper"):
        paged_attention(q, case.cache, 0, implementation="mosaic_gpu", **arguments)
    monkeypatch.setattr(Gpu, "compute_capability", "8.0")
    monkeypatch.setattr(target, "target_device", lambda: Gpu)
    with pytest.raises(NotImplementedError, match="only NVIDIA Hopper"):
        paged_attention(q, case.cache, 0, implementation="mosaic_gpu", **arguments)
