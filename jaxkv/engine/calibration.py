"""How fast a device computes prompts and swaps blocks, measured before it serves."""

# A Batch holds numpy arrays on this side of the step, jax.Array inside it.
# pyright: reportArgumentType=false

import statistics
import time
from collections.abc import Callable

import numpy as np

from jaxkv.engine.batch import BatchBuilder
from jaxkv.engine.runner import ModelRunner

_REPEATS = 3
_NUM_BLOCKS = 8


def _seconds(action: Callable[[], object]) -> float:
    """Return the median time of an action, run once before."""
    action()  # it may compile, and touches new memory
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure_prefill_rate(runner: ModelRunner, builder: BatchBuilder) -> float:
    """Return tokens a second in the largest step, all of them of one prompt.

    Nothing but the null block is written.
    """
    batch = builder.empty(builder.buckets[-1])
    num_tokens = min(len(batch.token_ids), builder.max_model_len)
    ends = np.full_like(batch.cu_q_lens, num_tokens)
    ends[0] = 0
    kv_lens = np.zeros_like(batch.kv_lens)
    kv_lens[0] = num_tokens
    positions = np.minimum(np.arange(len(batch.positions)), num_tokens - 1)
    batch = batch._replace(
        positions=positions.astype(np.int32), kv_lens=kv_lens, cu_q_lens=ends
    )
    return num_tokens / _seconds(lambda: runner.collect(runner.dispatch(batch)))


def measure_swap_bandwidth(runner: ModelRunner, bytes_per_block: int) -> float:
    """Return bytes a second between device and host; no block changes."""
    block_ids = [1] * _NUM_BLOCKS  # its own content goes back

    def there_and_back() -> None:
        content = runner.swap_out(block_ids)
        runner.swap_in(content, block_ids)
        runner.wait()

    return 2 * _NUM_BLOCKS * bytes_per_block / _seconds(there_and_back)
