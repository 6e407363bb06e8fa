"""The kernels compiled for an H200 that need not be there: what they take."""

import functools
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

from pallas_kernels import paged_attention_mosaic_gpu
from tests import gpu_target

# Registers and shared memory of each case by jax release. A change may lower them; one
# that raises them has to say so here.
BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text())
SHARED_MEMORY_OF_A_CTA = 232_448
REGISTERS_OF_AN_SM = 65_536
THREADS = {"decode": 256, "prefill": 384}


class Case(NamedTuple):
    """Shapes of a batch; more tokens than rows are prefill."""

    tokens: int
    rows: int
    keys: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None


CASES = {
    "llama-3.1-8b decode, 64 x 8k": Case(64, 64, 8192),
    "llama-3.1-8b decode, 1 x 32k": Case(1, 1, 32768),
    "llama-3.1-8b decode, 256 x 1k": Case(256, 256, 1024),
    "llama-3.1-70b decode, 64 x 8k": Case(64, 64, 8192, q_heads=64, block_size=128),
    "decode, window and soft cap": Case(64, 64, 8192, window=4096, soft_cap=30.0),
    "smollm2-135m decode": Case(32, 32, 2048, q_heads=9, kv_heads=3, head_dim=64),
    "decode, head_dim 256": Case(8, 8, 2048, q_heads=16, head_dim=256, block_size=8),
    "decode, the largest groups": Case(8, 8, 2048, q_heads=128, kv_heads=2),
    "decode, head_dim 192": Case(
        8, 8, 2048, q_heads=64, kv_heads=2, head_dim=192, soft_cap=30.0
    ),
    "llama-3.1-8b prefill, 2k tokens": Case(2048, 64, 8192),
    "llama-3.1-70b prefill, 8k tokens": Case(8192, 256, 32768, q_heads=64),
    "prefill, window and soft cap": Case(512, 64, 8192, window=4096, soft_cap=30.0),
    "smollm2-135m prefill": Case(512, 32, 2048, q_heads=9, kv_heads=3, head_dim=64),
}


def resources(case):
    """Compile a case; return {registers, spills, shared_memory}."""
    case = Case(*case)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"
    width = case.keys // case.block_size

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(
        4096, case.kv_heads, case.block_size, case.head_dim, dtype=jnp.bfloat16
    )
    with tempfile.TemporaryFile("w+") as output:
        # The compiler writes to the process's own streams.
        sys.stdout.flush()
        saved = [os.dup(1), os.dup(2)]
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            gpu_target.compile_for_h200(
                functools.partial(
                    paged_attention_mosaic_gpu,
                    scale=0.1,
                    window=case.window,
                    soft_cap=case.soft_cap,
                ),
                array(case.tokens, case.q_heads, case.head_dim, dtype=jnp.bfloat16),
                pool,
                pool,
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

    return {
        "registers": max(numbers(r"Used (\d+) registers")),
        "spills": sum(numbers(r"(\d+) bytes spill")),
        "shared_memory": max(numbers(r"smem_scratch_bytes=(\d+)")),
    }


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_an_h200_within_its_budget(case):
    found = gpu_target.call(resources, case=CASES[case])
    assert found["spills"] == 0
    assert found["shared_memory"] <= SHARED_MEMORY_OF_A_CTA
    kernel = "decode" if "decode" in case else "prefill"
    assert found["registers"] * THREADS[kernel] <= REGISTERS_OF_AN_SM
    if jax.__version__ not in BUDGET:
        pytest.skip(f"budget.json has no figures for jax {jax.__version__}: {found}")
    budget = BUDGET[jax.__version__][case]
    assert found["registers"] <= budget["registers"]
    assert found["shared_memory"] <= budget["shared_memory"]
