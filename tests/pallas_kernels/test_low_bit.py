"""Decoding from quantised keys and values, in Pallas' GPU interpreter."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    decode,
    mosaic,
    operands,
    paged_attention,
    paged_attention_reference,
)
from tests.helpers import Workload, dense_attention
from tests.pallas_kernels.low_bit import low_bit_case
from tests.pallas_kernels.planting import FREE, planted_kernel

# Copies take turns as pseudo-threads of the race detector: with the 5 that it has by
# default, a copy may pass for an earlier one that was waited for.
INTERPRET = plgpu.InterpretGPUParams(
    detect_races=True, num_tma_threads_per_device=4 * 4 * 4 + 1
)
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


def errors(result, case, options):
    """Return the errors of outputs, in sizes of a value, and of log-sum-exps."""
    out, lse = result
    expected_out, expected_lse = dense_attention(case, **options)
    size = np.sqrt(np.mean(np.concatenate(case.values) ** 2))
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    finite = np.isfinite(expected_lse)
    return (
        np.abs(np.asarray(out, np.float64) - expected_out).max() / size,
        np.abs(np.asarray(lse)[finite] - expected_lse[finite]).max(initial=0.0),
    )


def check(k_format, v_format, workload, dtype, options, *, v_size=1.0):
    case, arrays = low_bit_case(
        workload, k_format, v_format, dtype=dtype, v_size=v_size
    )
    options = {"scale": workload.head_dim**-0.5} | options
    result = paged_attention(**arrays, **options, return_lse=True, interpret=INTERPRET)
    assert result[0].dtype == dtype
    jax.block_until_ready(result)
    assert not interpreter.get_races().races_found
    out_error, lse_error = errors(result, case, options)
    assert out_error < TOLERANCE[dtype]
    assert lse_error < LSE_TOLERANCE


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


def test_queries_beyond_float16_saturate():
    case, arrays = low_bit_case(SHORT, *["fp8_e4m3"] * 2)
    q = 1e5 * arrays["q"]
    limit = float(np.finfo(np.float16).max)
    clipped = np.clip(np.asarray(q, np.float32), -limit, limit)
    assert 0.2 < np.mean(np.abs(clipped) == limit) < 0.8
    result = paged_attention(
        **(arrays | {"q": q}), scale=1e-6, return_lse=True, interpret=INTERPRET
    )
    case = dataclasses.replace(case, q=clipped)
    out_error, lse_error = errors(result, case, {"scale": 1e-6})
    assert out_error < TOLERANCE["bfloat16"]
    assert lse_error < LSE_TOLERANCE


@pytest.mark.parametrize(
    "name", ["plain", "int8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_static", "int4"]
)
def test_the_reference_equals_dense_softmax(name):
    options = {"scale": 0.2, "window": 70, "soft_cap": 5.0}
    case, arrays = low_bit_case(LONG, name, name)
    arrays["block_tables"] = arrays["block_tables"] % len(arrays["k_blocks"])
    arrays["q"] = arrays["q"].astype("float32")
    result = paged_attention_reference(**arrays, **options, return_lse=True)
    assert max(errors(result, case, options)) < 1e-5


# The ring of 4 tiles goes round; the last tile and its last block are part full.
FAULTY = Workload(rows=((3, 341),), kv_heads=1, head_dim=64, block_size=16)


def run_edited(monkeypatch, formats, *edited, num_splits=1, v_size=1.0):
    """Run decoding with a fault planted; return its errors against dense softmax."""
    case, arrays = low_bit_case(FAULTY, *formats, v_size=v_size)
    k, v = (
        mosaic.Stored(arrays[f"{name}_blocks"], arrays.get(f"{name}_scales"))
        for name in "kv"
    )
    others = (arrays[name] for name in ("block_tables", "kv_lens", "cu_q_lens"))
    function = decode.paged_decode
    if edited:
        function = planted_kernel(monkeypatch, decode, *edited).paged_decode
    result = function(
        arrays["q"],
        k,
        v,
        *others,
        scale=0.125,
        tokens_per_tile=3,
        num_splits=num_splits,
        interpret=INTERPRET,
    )
    jax.block_until_ready(result)
    assert not interpreter.get_races().races_found
    return errors(result, case, {"scale": 0.125})


INT8, INT4, FP8 = ("int8",) * 2, ("int4",) * 2, ("fp8_e4m3",) * 2


@pytest.mark.parametrize("num_splits", [1, 4, 7])  # 6 tiles: one, uneven, empty ones
@pytest.mark.parametrize("formats", [INT8, INT4, FP8], ids=str)
def test_the_case_for_faults_is_right_without_one(monkeypatch, formats, num_splits):
    out_error, lse_error = run_edited(monkeypatch, formats, num_splits=num_splits)
    assert out_error < TOLERANCE["bfloat16"]
    assert lse_error < LSE_TOLERANCE


# What was, what it becomes, by the formats that it is planted under.
WRONG_VALUES = {
    "the keys' scales on the values": (
        (INT8, INT4),
        mosaic,
        ("(v.scales, ring.v", "(k.scales, ring.v"),
    ),
    "the values' scales on the keys": (
        (INT8, INT4),
        mosaic,
        ("(k.scales, ring.k", "(v.scales, ring.k"),
    ),
    "all scales of a tile's first block": (
        (INT8, INT4),
        mosaic,
        (
            "for block_id, inside, offset in sources:",
            "for block_id, inside, offset in (sources if len(pool.shape) == 4 else "
            "[(sources[0][0], *rest) for _, *rest in sources]):",
        ),
    ),
    "the keys' scales forgotten": (
        (FP8,),
        operands,
        (
            "return products * lax.broadcast_in_dim(scales, shape, [0])",
            "return products",
        ),
    ),
    "the int8 keys' scales forgotten": (
        (INT8,),
        operands,
        ("products *= lax.broadcast_in_dim(of_keys, shape, [0])", "pass"),
    ),
    "the queries' scales forgotten": (
        (INT8,),
        operands,
        (
            "return products * lax.broadcast_in_dim(of_lines, shape, [1])",
            "return products",
        ),
    ),
    "the queries' last term left out": (
        (INT8,),
        operands,
        ("enumerate(terms[1:], start=1)", "enumerate(terms[1:-1], start=1)"),
    ),
    "the values' scales forgotten": (
        (INT8, FP8),
        decode,
        ("weights = _weighted(weights, factors)", "pass"),
    ),
    "unwritten scales left as they are": (
        (INT8, FP8),
        operands,
        (
            "jnp.where(is_written, registers.load_per_row(stage.scales), 0.0)",
            "registers.load_per_row(stage.scales)",
        ),
    ),
    "unwritten scales of int4 left as they are": (
        (INT4,),
        operands,
        ("jnp.where(is_written, scales, 0.0)", "scales"),
    ),
    "unwritten codes left as they are": (
        (FP8,),
        operands,
        ("if jnp.issubdtype(self.codes_dtype, jnp.floating):", "if False:"),
    ),
    "the halves of a byte swapped": (
        (INT4,),
        operands,
        ("codes.reshape(*codes", "codes[..., ::-1].reshape(*codes"),
    ),
    "int4 keys' scales in the wrong order": (
        (INT4,),
        operands,
        (
            "products, self._scales(stage, registers)",
            "products, self._scales(stage, registers)[::-1]",
        ),
    ),
    "int4 values' scales in the wrong order": (
        (INT4,),
        operands,
        (
            "enumerate(self._scales(stage, registers))",
            "enumerate(self._scales(stage, registers)[::-1])",
        ),
    ),
    "splits merged unweighted": (
        (INT8,),
        decode,
        (
            "merge_partials(outs.swapaxes(-1, -2), lses)",
            "outs.swapaxes(-1, -2).mean(0), lses.max(0)",
        ),
    ),
}
RACES = {
    "no wait for the keys and scales": (
        (INT8, INT4),
        decode,
        ("plgpu.barrier_wait(ring.k_ready.at[stage])", "pass"),
    ),
    "the values' scales waited for too late": (
        (INT8,),
        mosaic,
        (
            "(v.scales, ring.v.scales, ring.k_ready)",
            "(v.scales, ring.v.scales, ring.v_ready)",
        ),
        ("for side in (k, v))", "for side in (k,))"),
        ("v_ready=barriers(pieces)", "v_ready=barriers(2 * pieces)"),
    ),
    "no wait for the values": (
        (INT8, INT4),
        decode,
        ("wait_for_values(ring, stage", "(lambda *_, **__: None)(ring, stage"),
    ),
    "no wait for the zeros": (
        (FP8,),
        mosaic,
        ("plgpu.barrier_wait(ring.zeroed)", "pass"),
    ),
    "a slot released before its keys are read": (
        (INT8, INT4),
        decode,
        ("products = keys.products(", f"{FREE}; products = keys.products("),
    ),
    "a slot released before its values are read": (
        (INT8, INT4),
        decode,
        ("operand = values.values(", f"{FREE}; operand = values.values("),
    ),
    "no wait for a free slot": (
        (INT8,),
        mosaic,
        ("plgpu.barrier_wait(ring.free.at[stage])", "pass"),
    ),
}


def planted(faults):
    return [
        pytest.param(formats, edited, id=f"{name} ({formats[0]})")
        for name, (under, *edited) in faults.items()
        for formats in under
    ]


@pytest.mark.parametrize(("formats", "edited"), planted(WRONG_VALUES))
def test_values_show_a_planted_fault(monkeypatch, formats, edited):
    num_splits = 2 if "merge" in edited[1][0] else 1
    out_error, lse_error = run_edited(
        monkeypatch, formats, *edited, num_splits=num_splits
    )
    # NaN compares as not less, too.
    assert not (out_error < 2 * TOLERANCE["bfloat16"] and lse_error < LSE_TOLERANCE)


def test_values_too_large_for_16_bits_show_a_weight_that_is_not_scaled(monkeypatch):
    edited = (decode, ("_highest(scores, factors))", "_highest(scores, None))"))
    out_error, _ = run_edited(monkeypatch, FP8, *edited, v_size=2.0**40)
    assert not out_error < 2 * TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("formats", "edited"), planted(RACES))
def test_the_interpreter_shows_a_planted_fault(monkeypatch, formats, edited):
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError)) as caught:
        run_edited(monkeypatch, formats, *edited)
    assert re.search(
        "RACE DETECTED|no threads observed|only observed|races_found", str(caught.value)
    )


@pytest.mark.parametrize(
    ("formats", "dtype", "changes", "named"),
    [
        (INT4, "float16", {}, "int4 keys with queries of float16"),
        (
            ("plain", "int4"),
            "bfloat16",
            {"head_dim": 192},
            "int4 values of head_dim 192",
        ),
        (INT8, "bfloat16", {"block_size": 4}, "block_size 4"),
        (INT8, "bfloat16", {"head_dim": 80}, "head_dim 80"),
        (INT8, "bfloat16", {"q_heads": 65, "kv_heads": 1}, "65 query heads"),
        (INT4, "bfloat16", {"q_heads": 33, "kv_heads": 1, "head_dim": 128}, "33 query"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(formats, dtype, changes, named):
    workload = Workload(**{"rows": ((1, 5),), "head_dim": 64} | changes)
    _, arrays = low_bit_case(workload, *formats, dtype=dtype)
    with pytest.raises(NotImplementedError, match=named):
        paged_attention(**arrays, scale=1.0, interpret=INTERPRET)


def test_scales_that_do_not_fit_are_named():
    _, arrays = low_bit_case(SHORT, *INT8)
    k_scales = arrays["k_scales"]
    plain = low_bit_case(SHORT, "plain", "plain")[1]
    for wrong, message in (
        (arrays | {"k_scales": None}, "k_scales must be given: k_blocks is int8"),
        (arrays | {"v_scales": k_scales[:, :1]}, "v_scales has shape"),
        (arrays | {"k_scales": k_scales.astype("float16")}, "k_scales must be float32"),
        (plain | {"k_scales": k_scales}, "k_scales must be None: k_blocks is bfloat16"),
        (arrays | {"v_blocks": arrays["v_blocks"][..., :32]}, "v_blocks has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(**wrong, scale=1.0, interpret=INTERPRET)
