"""The decode kernel compiled for an H200 that need not be there: what it takes."""

import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode import paged_decode
from tests import gpu_target

# Registers and shared memory of each case by jax release. A change may lower them; one
# that raises them has to say so here.
BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text())
SHARED_MEMORY_OF_A_CTA = 232_448
REGISTERS_OF_AN_SM = 65_536
THREADS = 256

# (queries, q_heads, kv_heads, head_dim, keys, block_size, options)
CASES = {
    "llama-3.1-8b, 64 x 8k": (64, 32, 8, 128, 8192, 16, {}),
    "llama-3.1-8b, 1 x 32k": (1, 32, 8, 128, 32768, 16, {}),
    "llama-3.1-8b, 256 x 1k": (256, 32, 8, 128, 1024, 16, {}),
    "llama-3.1-70b, 64 x 8k, blocks of 128": (64, 64, 8, 128, 8192, 128, {}),
    "window and soft cap": (
        64,
        32,
        8,
        128,
        8192,
        16,
        {"window": 4096, "soft_cap": 30.0},
    ),
    "smollm2-135m, 32 x 2k": (32, 9, 3, 64, 2048, 16, {}),
    "head_dim 256, blocks of 8": (8, 16, 8, 256, 2048, 8, {}),
}


def resources(case):
    """Compile a case; return {registers, spills, shared_memory}."""
    singles, q_heads, kv_heads, head_dim, keys, block_size, options = CASES[case]
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"
    width = keys // block_size

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(singles * width, kv_heads, block_size, head_dim, dtype=jnp.bfloat16)
    with tempfile.TemporaryFile("w+") as output:
        # The compiler writes to the process's own streams.
        sys.stdout.flush()
        saved = [os.dup(1), os.dup(2)]
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            gpu_target.compile_for_h200(
                functools.partial(paged_decode, scale=0.1, **options),
                array(singles, q_heads, head_dim, dtype=jnp.bfloat16),
                pool,
                pool,
                array(singles, width),
                array(singles),
                array(singles),
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
    found = gpu_target.call(resources, case=case)
    assert found["spills"] == 0
    assert found["shared_memory"] <= SHARED_MEMORY_OF_A_CTA
    assert found["registers"] * THREADS <= REGISTERS_OF_AN_SM
    if jax.__version__ not in BUDGET:
        pytest.skip(f"budget.json has no figures for jax {jax.__version__}: {found}")
    budget = BUDGET[jax.__version__][case]
    assert found["registers"] <= budget["registers"]
    assert found["shared_memory"] <= budget["shared_memory"]
