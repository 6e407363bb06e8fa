"""The kernels in Pallas' GPU interpreter, which sees races and bad accesses."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import decode, mosaic, operands, paged_attention, prefill
from tests.helpers import Workload, dense_attention, random_paged_case
from tests.pallas_kernels.planting import FREE, planted_kernel

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# Weights are rounded to q's dtype before they meet the values, and so is the output.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}
LSE_TOLERANCE = 1e-5

# Lengths straddle blocks and tiles (64) and fill the ring of 3 stages more than once;
# dtypes, head_dims, groups, block sizes, windows and soft caps are paired, not crossed.
CASES = [
    (
        Workload(rows=((1, 1), (1, 16), (1, 17)), head_dim=64, block_size=16),
        "bfloat16",
        {},
    ),
    (
        Workload(rows=((1, 63), (1, 64), (1, 65)), q_heads=9, kv_heads=3, head_dim=64),
        "float16",
        {"soft_cap": 2.0},
    ),
    (
        Workload(
            rows=((1, 257), (0, 5), (1, 0)), kv_heads=1, head_dim=128, block_size=32
        ),
        "bfloat16",
        {"window": 70},
    ),
    (
        Workload(
            rows=((2, 130), (0, 0)),
            q_heads=2,
            head_dim=64,
            block_size=64,
            padding_rows=1,
            padding_tokens=1,
        ),
        "float16",
        {"window": 1},
    ),
    (
        Workload(rows=((1, 200),), q_heads=18, head_dim=64, block_size=128),
        "bfloat16",
        {"soft_cap": 30.0, "window": 64, "scale": 0.3},
    ),
    (
        Workload(rows=((1, 129),), q_heads=1, kv_heads=1, head_dim=256),
        "float16",
        {},
    ),
    # A few tokens a row share a tile: 3 of them, 2 where 3 x 6 heads are too many.
    (
        Workload(
            rows=((4, 130), (1, 65), (3, 3), (0, 7)), head_dim=64, padding_tokens=2
        ),
        "bfloat16",
        {},
    ),
    (
        Workload(rows=((3, 70),), q_heads=6, kv_heads=1, head_dim=256, block_size=16),
        "bfloat16",
        {"window": 3, "soft_cap": 3.0},
    ),
    # More than 8 tokens a row: the kernel for prefill. Query tiles hold 64, 42, 8 and
    # 32 tokens here.
    (
        Workload(
            rows=((65, 65), (1, 70), (0, 3), (5, 66)),
            head_dim=64,
            block_size=16,
            padding_rows=1,
            padding_tokens=3,
        ),
        "bfloat16",
        {},
    ),
    (
        Workload(rows=((43, 140),), q_heads=9, kv_heads=3, head_dim=64, block_size=32),
        "float16",
        {"window": 50, "soft_cap": 3.0},
    ),
    (
        Workload(
            rows=((25, 200), (2, 2), (1, 0)),
            q_heads=16,
            kv_heads=1,
            head_dim=128,
            block_size=128,
        ),
        "bfloat16",
        {"window": 1, "scale": 0.3},
    ),
    (
        Workload(rows=((34, 160),), kv_heads=1, head_dim=256, block_size=16),
        "bfloat16",
        {},
    ),
]


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    interpreter.reset_gpu_interpret_mode_state()


def arguments_of(case, dtype):
    """The kernel's arguments, and the case with the queries that it gets."""
    q = jnp.asarray(case.q, dtype)
    layer = case.cache.layers[0]
    block_size, width = layer.k.shape[2], case.block_tables.shape[1]
    is_used = np.arange(width) < -(-case.kv_lens // block_size)[:, None]
    arguments = (
        q,
        layer.k,
        layer.v,
        # What stands behind a row's last block is never looked at.
        jnp.asarray(np.where(is_used, case.block_tables, 2**30), jnp.int32),
        jnp.asarray(case.kv_lens),
        jnp.asarray(case.cu_q_lens),
    )
    return arguments, dataclasses.replace(case, q=np.asarray(q, np.float32))


@pytest.mark.parametrize(("workload", "dtype", "options"), CASES)
def test_equals_dense_softmax_without_a_race(workload, dtype, options):
    case = random_paged_case(workload, dtype=dtype, unused=np.nan)
    arguments, rounded = arguments_of(case, dtype)
    scale = options.get("scale", workload.head_dim**-0.5)
    out, lse = paged_attention(
        *arguments,
        **(options | {"scale": scale}),
        return_lse=True,
        interpret=INTERPRET,
    )
    assert out.dtype == dtype
    jax.block_until_ready((out, lse))
    assert not interpreter.get_races().races_found
    expected_out, expected_lse = dense_attention(rounded, **options)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), expected_out, atol=TOLERANCE[dtype], rtol=0
    )
    np.testing.assert_allclose(lse, expected_lse, atol=LSE_TOLERANCE, rtol=0)


DECODE = Workload(rows=((3, 300), (1, 20)), kv_heads=1, head_dim=64, block_size=16)
PREFILL = Workload(rows=((70, 300),), head_dim=64, block_size=16)


def run_kernel(function, workload, **options):
    """Run `paged_decode` or `paged_prefill`; return its error against dense softmax."""
    case = random_paged_case(workload, dtype="bfloat16", unused=np.nan)
    (q, k, v, *others), rounded = arguments_of(case, "bfloat16")
    arguments = (q, mosaic.Stored(k), mosaic.Stored(v), *others)
    result = function(*arguments, scale=0.125, interpret=INTERPRET, **options)
    return errors(result, rounded)


def errors(result, case):
    out, lse = jax.block_until_ready(result)
    assert not interpreter.get_races().races_found
    expected_out, expected_lse = dense_attention(case)
    return (
        np.abs(np.asarray(out, np.float32) - expected_out).max(),
        np.abs(lse - expected_lse).max(),
    )


def test_the_case_for_faults_in_prefill_is_right_without_one():
    out_error, lse_error = run_kernel(prefill.paged_prefill, PREFILL)
    assert out_error < TOLERANCE["bfloat16"]
    assert lse_error < LSE_TOLERANCE


@pytest.mark.parametrize("num_splits", [1, 2, 7])  # 5 tiles: one, uneven, empty ones
def test_the_number_of_splits_changes_nothing(num_splits):
    out_error, lse_error = run_kernel(
        decode.paged_decode, DECODE, num_splits=num_splits, tokens_per_tile=2
    )
    assert out_error < TOLERANCE["bfloat16"]
    assert lse_error < LSE_TOLERANCE


# Each fault is an edit of a source: what it was, what it becomes. Those of mosaic.py
# and operands.py are planted under both kernels.
WRONG_VALUES = {
    "values taken from the keys": (mosaic, "(v.codes, ring", "(k.codes, ring"),
    "the last block left out": (
        mosaic,
        "last_block = jnp.maximum(kv_end - 1, 0) // block_size",
        "last_block = jnp.maximum((kv_end - 1) // block_size - 1, 0)",
    ),
    "unwritten values left as they are": (operands, "jnp.zeros_like(read)", "read"),
    "splits merged unweighted": (
        decode,
        "merge_partials(outs.swapaxes(-1, -2), lses)",
        "outs.swapaxes(-1, -2).mean(0), lses.max(0)",
    ),
    "decode's causal mask off by one": (
        decode,
        "visible = key_index <= last_visible",
        "visible = key_index <= last_visible + 1",
    ),
    "the heads of a group taken for tokens in decode": (
        decode,
        "token = registers.iota(shape, 1) // group",
        "token = registers.iota(shape, 1)",
    ),
    "prefill's causal mask off by one": (
        prefill,
        "jnp.where(column <= ahead,",
        "jnp.where(column <= ahead + 1,",
    ),
    "the heads of a group taken for tokens in prefill": (
        prefill,
        "position - first * TILE_KV + line // group",
        "position - first * TILE_KV + line",
    ),
}
WAIT_FOR_VALUES = "plgpu.barrier_wait(ring.v_ready.at[stage])"
COMMIT = "        plgpu.commit_smem()\n        "
RACES = {
    "no wait for a free slot": (
        mosaic,
        "plgpu.barrier_wait(ring.free.at[stage])",
        "pass",
    ),
    "no wait for the values": (
        mosaic,
        f"{WAIT_FOR_VALUES}\n\n    @pl.when(key",
        "pass\n\n    @pl.when(key",
    ),
    "no wait for the zeros": (mosaic, "plgpu.barrier_wait(ring.zeroed)", "pass"),
    "values zeroed before they arrive": (
        mosaic,
        "lax.fori_loop(oldest, num_tiles, observe_values, ())",
        "pass",
    ),
    "no wait for the keys": (
        decode,
        "plgpu.barrier_wait(ring.k_ready.at[stage])",
        "pass",
    ),
    "a slot released before decode has read it": (
        decode,
        "acc = registers.add_product(acc, operand",
        f"{FREE}; acc = registers.add_product(acc, operand",
    ),
    "a slot released before prefill has read it": (
        prefill,
        "acc = registers.add_product(acc, weights, ring.v",
        f"{FREE}; acc = registers.add_product(acc, weights, ring.v",
    ),
    "no commit before decode's copy out": (
        decode,
        f"{COMMIT}plgpu.copy_smem_to_gmem(out_smem",
        "        plgpu.copy_smem_to_gmem(out_smem",
    ),
    "no commit before prefill's copy out": (
        prefill,
        f"{COMMIT}lines = pl.ds",
        "        lines = pl.ds",
    ),
}


def planted(faults):
    """Pairs of a fault and a kernel that it is planted under."""
    return [
        pytest.param(fault, kernel, id=f"{name} ({kernel.__name__})")
        for name, fault in faults.items()
        for kernel in (decode, prefill)
        if fault[0] in (mosaic, operands, kernel)
    ]


@pytest.fixture
def run_edited(monkeypatch):
    """run_edited(fault, kernel): run a kernel's case with a fault planted."""

    def run(fault, kernel):
        edited, old, new = fault
        changed = planted_kernel(monkeypatch, kernel, edited, (old, new))
        if kernel is prefill:
            return run_kernel(changed.paged_prefill, PREFILL)
        num_splits = 2 if "merge" in old else 1
        return run_kernel(
            changed.paged_decode, DECODE, num_splits=num_splits, tokens_per_tile=2
        )

    return run


@pytest.mark.parametrize(("fault", "kernel"), planted(WRONG_VALUES))
def test_values_show_a_planted_fault(fault, kernel, run_edited):
    out_error, lse_error = run_edited(fault, kernel)
    # NaN compares as not less, too.
    assert not (out_error < 2 * TOLERANCE["bfloat16"] and lse_error < LSE_TOLERANCE)


@pytest.mark.parametrize(("fault", "kernel"), planted(RACES))
def test_the_interpreter_shows_a_planted_fault(fault, kernel, run_edited):
    # A race is raised, or stops the interpreter's count of barriers, or, in jax 0.11.2,
    # is only noted.
    with pytest.raises((jax.errors.JaxRuntimeError, AssertionError)) as caught:
        run_edited(fault, kernel)
    assert re.search(
        "RACE DETECTED|no threads observed|only observed|races_found", str(caught.value)
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"q": "float32", "cache": "float32"}, "queries of float32"),
        ({"cache": "float16"}, "a cache of float16"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 4}, "block_size 4"),
        ({"q_heads": 258}, "129 query heads for a KV head"),
    ],
)
def test_what_no_kernel_can_do_is_named(changes, named):
    dtypes = {"q": "bfloat16", "cache": "bfloat16"}
    dtypes |= {name: changes[name] for name in dtypes if name in changes}
    shape = {name: value for name, value in changes.items() if name not in dtypes}
    workload = Workload(**{"rows": ((1, 5),), "head_dim": 64} | shape)
    case = random_paged_case(workload, dtype=dtypes["cache"])
    arguments, _ = arguments_of(case, dtypes["q"])
    with pytest.raises(NotImplementedError, match=named):
        paged_attention(*arguments, scale=1.0, interpret=INTERPRET)


def test_a_device_that_no_kernel_knows_is_named():
    case = random_paged_case(Workload(rows=((1, 5),), head_dim=64), dtype="bfloat16")
    arguments, _ = arguments_of(case, "bfloat16")
    with pytest.raises(NotImplementedError, match="device of kind cpu: only NVIDIA"):
        paged_attention(*arguments, scale=1.0)


def test_arguments_that_do_not_fit_are_named():
    case = random_paged_case(Workload(rows=((1, 5),), head_dim=64), dtype="bfloat16")
    names = ("q", "k_blocks", "v_blocks", "block_tables", "kv_lens", "cu_q_lens")
    arguments = dict(zip(names, arguments_of(case, "bfloat16")[0], strict=True))
    wrong = {
        "q": arguments["q"][:, :3],
        "k_blocks": arguments["k_blocks"][0],
        "v_blocks": arguments["v_blocks"][:1],
        "block_tables": arguments["block_tables"].astype("uint32"),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "cu_q_lens": arguments["cu_q_lens"][1:],
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} "):
            paged_attention(**(arguments | {name: value}), scale=1.0)
    with pytest.raises(ValueError, match=r"^q has shape \(0, 4, 64\): nothing in it"):
        paged_attention(**(arguments | {"q": arguments["q"][:0]}), scale=1.0)
    for name, value in (
        ("window", 0),
        ("window", 2**31),
        ("soft_cap", 0.0),
        ("soft_cap", math.inf),
        ("scale", -1.0),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
            paged_attention(**(arguments | {"scale": 1.0, name: value}))


@pytest.mark.parametrize(
    ("num_programs", "max_tiles", "per_sm", "expected"),
    [
        (8, 1, 2, 1),  # nothing to split
        (264, 128, 2, 1),  # full without: 132 multiprocessors, 2 programs each
        (512, 128, 2, 1),
        (132, 128, 2, 2),  # 264 of 264
        (132, 128, 1, 1),
        (8, 128, 2, 32),  # one wave of 256, 4 tiles a split; 33 would not be faster
        (8, 16, 2, 16),  # no more splits than tiles
        (8, 33, 2, 33),  # 17..32 splits would have 2 tiles each
        (200, 128, 2, 5),  # 4 waves of 26 tiles = 104; one split 128, the best 97
    ],
)
def test_splits_fill_the_multiprocessors(num_programs, max_tiles, per_sm, expected):
    found = decode.choose_num_splits(num_programs, max_tiles, programs_per_sm=per_sm)
    assert found == expected
