"""The kernels compiled for an H200 that need not be there: what they take."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_target
from pallas_kernels import decode, operands, paged_attention, prefill
from pallas_kernels.entry import MAX_DECODE_TOKENS
from pallas_kernels.mosaic import TILE_KV, Stored

# What each case takes, by jax release. A change may lower it; one that raises it has to
# say so there: `python -m tests.pallas_kernels.write_budget`.
BUDGET_FILE = Path(__file__).with_name("budget.json")
BUDGET = json.loads(BUDGET_FILE.read_text())
SHARED_MEMORY_OF_A_CTA = 232_448
SHARED_MEMORY_OF_AN_SM = 233_472
SHARED_MEMORY_OVERHEAD = 1024  # of a CTA
REGISTERS_OF_AN_SM = 65_536
THREADS = {"decode": 256, "prefill": 384}
NEEDED_IN_FLIGHT = 36_000  # 4.8 TB/s over 132 SMs for 1 us


class Case(NamedTuple):
    """Shapes of a batch; more than 8 tokens a row are prefill."""

    tokens: int
    rows: int
    keys: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    num_blocks: int = 4096
    window: int | None = None
    soft_cap: float | None = None
    k_format: str = "plain"
    v_format: str = "plain"


CASES = {
    "llama-3.1-8b decode, 64 x 8k": Case(64, 64, 8192),
    "llama-3.1-8b decode, 1 x 32k": Case(1, 1, 32768),
    "llama-3.1-8b decode, 256 x 1k": Case(256, 256, 1024),
    "llama-3.1-70b decode, 64 x 8k": Case(64, 64, 8192, q_heads=64, block_size=128),
    "decode, a pool of more than 2**31 elements": Case(
        64, 64, 8192, num_blocks=300_000
    ),
    "decode, window and soft cap": Case(64, 64, 8192, window=4096, soft_cap=30.0),
    "smollm2-135m decode": Case(32, 32, 2048, q_heads=9, kv_heads=3, head_dim=64),
    "decode, head_dim 256": Case(8, 8, 2048, q_heads=16, head_dim=256, block_size=8),
    "decode, the largest groups": Case(8, 8, 2048, q_heads=128, kv_heads=2),
    "decode, head_dim 192": Case(
        8, 8, 2048, q_heads=64, kv_heads=2, head_dim=192, soft_cap=30.0
    ),
    "llama-3.1-8b decode, 64 x 4 tokens": Case(256, 64, 8192),
    "decode, 8 tokens a row, the most lines": Case(512, 64, 8192, q_heads=64),
    **{
        f"llama-3.1-8b decode, 64 x 8k, {name}": Case(
            64, 64, 8192, k_format=name, v_format=name
        )
        for name in ("int8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3_static", "int4")
    },
    **{
        f"smollm2-135m decode, {name}": Case(
            32,
            32,
            2048,
            q_heads=9,
            kv_heads=3,
            head_dim=64,
            k_format=name,
            v_format=name,
        )
        for name in ("int8", "fp8_e4m3", "int4")
    },
    **{
        f"decode, head_dim 256, {name}": Case(
            8,
            8,
            2048,
            q_heads=16,
            head_dim=256,
            block_size=8,
            k_format=name,
            v_format=name,
        )
        for name in ("int8", "fp8_e4m3", "int4")
    },
    "decode, 4 tokens a row, int8": Case(
        256, 64, 8192, k_format="int8", v_format="int8"
    ),
    "decode, 4 tokens a row, int4": Case(
        256, 64, 8192, k_format="int4", v_format="int4"
    ),
    "decode, 8 tokens a row, the most lines, int8": Case(
        512, 64, 8192, q_heads=64, k_format="int8", v_format="int8"
    ),
    "decode, 8 tokens a row, the most lines, int4": Case(
        512, 64, 8192, k_format="int4", v_format="int4"
    ),
    "decode, keys int8 and values int4": Case(
        64, 64, 8192, window=4096, soft_cap=30.0, k_format="int8", v_format="int4"
    ),
    "decode, keys plain and values int8": Case(64, 64, 8192, v_format="int8"),
    "llama-3.1-8b prefill, 2k tokens": Case(2048, 64, 8192),
    "llama-3.1-70b prefill, 8k tokens": Case(8192, 256, 32768, q_heads=64),
    "prefill, window and soft cap": Case(1024, 64, 8192, window=4096, soft_cap=30.0),
    "prefill, head_dim 192": Case(1024, 8, 2048, q_heads=16, head_dim=192),
    "prefill, head_dim 256": Case(1024, 8, 2048, q_heads=16, head_dim=256),
    "prefill, head_dim 256, window and soft cap": Case(
        1024, 8, 8192, q_heads=16, head_dim=256, window=4096, soft_cap=30.0
    ),
    "smollm2-135m prefill": Case(512, 32, 2048, q_heads=9, kv_heads=3, head_dim=64),
}


CODES = {
    "plain": jnp.bfloat16,
    "int8": jnp.int8,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int4": jnp.uint8,
}


def stored(case, format_name):
    """Return a side's arrays."""
    slots = (case.num_blocks, case.kv_heads, case.block_size)
    name = format_name.removesuffix("_static")
    width = case.head_dim // 2 if name == "int4" else case.head_dim
    codes = jax.ShapeDtypeStruct((*slots, width), CODES[name])
    if name == "int4":
        shape = (*slots, case.head_dim // operands.GROUP)
        return Stored(codes, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    if name == "plain" or name != format_name:
        return Stored(codes)
    return Stored(codes, jax.ShapeDtypeStruct(slots, jnp.float32))


def held(array):
    """Return the array that a cache has in an array's place: float8 are bytes there."""
    is_float8 = array.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    return jax.ShapeDtypeStruct(array.shape, jnp.uint8) if is_float8 else array


def resources(case):
    """Compile a case for an H200; return what budget.json holds of it."""
    case = Case(*case)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"
    width = case.keys // case.block_size

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = array(case.tokens, case.q_heads, case.head_dim, dtype=jnp.bfloat16)
    sides = [stored(case, name) for name in (case.k_format, case.v_format)]

    def run(q, k, v, *others):
        codes = [
            x.codes
            if x.codes.dtype == side.codes.dtype
            else jax.lax.bitcast_convert_type(x.codes, side.codes.dtype)
            for x, side in zip((k, v), sides, strict=True)
        ]
        return paged_attention(
            q,
            *codes,
            *others,
            k_scales=k.scales,
            v_scales=v.scales,
            scale=0.1,
            window=case.window,
            soft_cap=case.soft_cap,
        )

    with tempfile.TemporaryFile("w+") as output:
        # The compiler writes to the process's own streams.
        sys.stdout.flush()
        saved = [os.dup(1), os.dup(2)]
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            compiled = gpu_target.compile_for_h200(
                run,
                q,
                *jax.tree.map(held, sides),
                array(case.rows, width),
                array(case.rows),
                array(case.rows + 1),
            )
            sys.stdout.flush()
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
        output.seek(0)
        text = output.read()

    def numbers(pattern):
        return [int(number) for number in re.findall(pattern, text)]

    is_decode = case.tokens <= MAX_DECODE_TOKENS * case.rows
    registers = max(numbers(r"Used (\d+) registers"))
    shared_memory = max(numbers(r"smem_scratch_bytes=(\d+)"))
    threads = THREADS["decode" if is_decode else "prefill"]
    programs = min(
        SHARED_MEMORY_OF_AN_SM // (shared_memory + SHARED_MEMORY_OVERHEAD),
        REGISTERS_OF_AN_SM // (registers * threads),
    )
    keys, values = (operands.operand_of(side, q, "sides") for side in sides)
    if is_decode:
        stages = decode.num_stages(keys, values)
    else:
        stages = prefill.NUM_STAGES[case.head_dim]
    bytes_of_key = keys.bytes_per_key + values.bytes_per_key
    return {
        # A loop around the kernel would be a launch for each of its iterations.
        "loops": compiled.as_text().count(" while("),
        "registers": registers,
        "spills": sum(numbers(r"stack frame, (\d+) bytes spill stores")),
        "shared_memory": shared_memory,
        # An SM's programs have all stages of keys and values on their way at most.
        "bytes_in_flight": programs * stages * TILE_KV * bytes_of_key,
        # Of XLA's: a copy of a pool would be among them.
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


@pytest.mark.gpu_compile
@pytest.mark.parametrize("case", CASES)
def test_compiles_for_an_h200_within_its_budget(case):
    found = gpu_target.call(resources, case=CASES[case])
    assert found["shared_memory"] <= SHARED_MEMORY_OF_A_CTA
    assert found["bytes_in_flight"] >= NEEDED_IN_FLIGHT
    assert found["loops"] == 0
    if "plain" not in (CASES[case].k_format, CASES[case].v_format):
        codes = stored(CASES[case], CASES[case].k_format).codes
        assert found["temporaries"] < codes.size * codes.dtype.itemsize
    if jax.__version__ not in BUDGET:
        pytest.skip(f"budget.json has no figures for jax {jax.__version__}: {found}")
    budget = BUDGET[jax.__version__][case]
    for name in ("registers", "spills", "shared_memory"):
        assert found[name] <= budget[name], name
    assert found["bytes_in_flight"] >= budget["bytes_in_flight"]


def test_only_prefill_of_head_dim_256_may_spill():
    spilling = {
        case
        for budget in BUDGET.values()
        for case, figures in budget.items()
        if figures.get("spills")
    }
    assert all(case.startswith("prefill, head_dim 256") for case in spilling)
