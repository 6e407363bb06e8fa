"""The CPU kernels beside XLA: products and attention, checked, then timed in turns.

    python -m benchmarks.cpu_kernels

Shapes are SmolLM2-135M's. A case's results are held against XLA's first; then both run
in turns, and medians are compared. A call of a product does one for every layer, each
with its own weights, so that they come from memory as in a step. JSON lines:

    us, xla_us       microseconds of one product, or of one layer's attention
    gflops           of ours; gb_per_s: weights, or keys and values, by the time
    xla_ratio        XLA's time by ours
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cpu_kernels
from jaxkv.device.attention_xla import paged_attention_xla
from jaxkv.engine.memory_advice import start_collapsing

LAYERS = 30
PRODUCTS = {"q, k and v": (960, 576), "gate and up": (3072, 576), "down": (576, 1536)}
TOKENS = (1, 8, 32, 256)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
ROWS = {  # rows, queries and keys of each
    "32 rows decode": (32, 1, 300),
    "1 row decodes": (1, 1, 2000),
    "a prompt of 256": (1, 256, 256),
}
LARGEST_ERROR = {"float32": 2e-5, "bfloat16": 4e-2}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        for name, shape in PRODUCTS.items():
            for tokens in TOKENS:
                products(name, shape, tokens, dtype, arguments.repeats)
        for name, case in ROWS.items():
            attention(name, case, dtype, arguments.repeats)


def products(
    name: str, shape: tuple[int, int], tokens: int, dtype: str, repeats: int
) -> None:
    """Time the products of some tokens with a weight of every layer."""
    out_dim, in_dim = shape
    rng = np.random.default_rng(0)
    weights = [
        jnp.asarray(rng.standard_normal(shape) / in_dim**0.5, dtype)
        for _ in range(LAYERS)
    ]
    start_collapsing(weights).join()
    x = jnp.asarray(rng.standard_normal((tokens, in_dim)), dtype)

    def all_layers(multiply: Callable, x: jax.Array, weights: list) -> jax.Array:
        y = jnp.zeros((tokens, out_dim), dtype)
        for weight in weights:
            (y,) = multiply(x + 0 * y[:, :1], weight)  # one after another
        return y

    calls = {
        implementation: functools.partial(
            jax.jit(functools.partial(all_layers, multiply)), x, weights
        )
        for implementation, multiply in (
            ("ours", cpu_kernels.multiply),
            ("xla", cpu_kernels.multiply_reference),
        )
    }
    seconds = in_turns(calls, LARGEST_ERROR[dtype], repeats)
    line = {"case": f"products: {name}", "dtype": dtype, "tokens": tokens}
    report(
        line,
        {key: value / LAYERS for key, value in seconds.items()},
        flops=2 * tokens * out_dim * in_dim,
        num_bytes=weights[0].nbytes,
    )


def attention(name: str, case: tuple[int, int, int], dtype: str, repeats: int) -> None:
    """Time the attention of one layer; its blocks lie all over the pool."""
    rows, queries, keys = case
    width = -(-keys // BLOCK_SIZE)
    rng = np.random.default_rng(0)
    shape = (1 + rows * width, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    start_collapsing((k, v)).join()
    block_ids = 1 + rng.permutation(rows * width)
    arguments = (
        jnp.asarray(rng.standard_normal((rows * queries, HEADS, HEAD_DIM)), dtype),
        k,
        v,
        jnp.asarray(block_ids.reshape(rows, width), jnp.int32),
        jnp.full(rows, keys, jnp.int32),
        jnp.arange(rows + 1, dtype=jnp.int32) * queries,
    )
    calls = {
        implementation: functools.partial(
            jax.jit(functools.partial(attend, scale=HEAD_DIM**-0.5)), *arguments
        )
        for implementation, attend in (
            ("ours", cpu_kernels.paged_attention),
            ("xla", paged_attention_xla),
        )
    }
    seconds = in_turns(calls, LARGEST_ERROR[dtype], repeats)
    num_pairs = rows * sum(range(keys - queries + 1, keys + 1))
    report(
        {"case": f"attention: {name}", "dtype": dtype, "keys": keys},
        seconds,
        flops=4 * HEADS * HEAD_DIM * num_pairs,
        num_bytes=2 * rows * keys * KV_HEADS * HEAD_DIM * k.dtype.itemsize,
    )


def in_turns(
    calls: dict[str, Callable[[], jax.Array]], largest_error: float, repeats: int
) -> dict[str, float]:
    """Check that all give the same and return the median seconds of each."""
    ours, xla = (np.asarray(call(), np.float64) for call in calls.values())
    error = np.abs(ours - xla).max()
    assert error <= largest_error, f"results differ by {error}"
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(
    line: dict[str, Any], seconds: dict[str, float], *, flops: int, num_bytes: int
) -> None:
    """Print a case's line."""
    line |= {
        "us": round(1e6 * seconds["ours"], 1),
        "xla_us": round(1e6 * seconds["xla"], 1),
        "gflops": round(flops / seconds["ours"] / 1e9, 1),
        "gb_per_s": round(num_bytes / seconds["ours"] / 1e9, 1),
        "xla_ratio": round(seconds["xla"] / seconds["ours"], 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
