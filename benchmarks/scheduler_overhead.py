"""What the scheduler costs on the host: no model, no device.

    python -m benchmarks.scheduler_overhead

Requests decode side by side with prefix caching on, and each step's `schedule` and
`commit` are timed by the process's CPU clock. Printed as one JSON line for each pool
size: milliseconds a step, microseconds to add and admit a request, and to hash a block,
and how many objects a step leaves for Python's garbage collector to find.
"""

import argparse
import gc
import json
import statistics
import time

from jaxkv.host.block_hash import BlockChain
from jaxkv.host.request import Request, SamplingParams, max_total_tokens
from jaxkv.host.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT = 64


def main() -> None:
    """Print one line for each pool size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--num-blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000]
    )
    arguments = parser.parse_args()
    needed = 1 + arguments.rows * (1 + -(-(PROMPT + arguments.steps + 8) // BLOCK_SIZE))
    if min(arguments.num_blocks) < needed:
        parser.error(
            f"{arguments.rows} rows of {arguments.steps} steps need {needed} blocks, "
            f"got {min(arguments.num_blocks)}"
        )
    for num_blocks in arguments.num_blocks:
        line = measure(arguments.rows, arguments.steps, num_blocks)
        print(json.dumps({"benchmark": "scheduler_overhead"} | line), flush=True)


def measure(rows: int, steps: int, num_blocks: int) -> dict[str, float]:
    """Run `rows` decoding requests for `steps` steps; return what they took."""
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * PROMPT,
        max_num_partial_prefills=rows,
    )
    start = time.process_time()
    for number in range(rows):
        scheduler.add(make_request(number, steps + 8, scheduler))
    schedule = scheduler.schedule()
    admit_us = 1e6 * (time.process_time() - start) / rows
    scheduler.commit(schedule, [7] * rows)
    gc.collect()
    gc.disable()
    seconds = []
    for step in range(steps):
        start = time.process_time()
        schedule = scheduler.schedule()
        assert len(schedule.rows) == rows, "a request does not run"
        scheduler.commit(schedule, [step] * rows)
        seconds.append(time.process_time() - start)
    del schedule
    garbage = gc.collect()
    gc.enable()
    return {
        "num_blocks": num_blocks,
        "rows": rows,
        "step_ms_median": round(1e3 * statistics.median(seconds), 3),
        "step_ms_max": round(1e3 * max(seconds), 3),
        "admit_us": round(admit_us, 1),
        "hash_us_a_block": round(hash_us(), 2),
        "garbage_objects": garbage,
    }


def make_request(number: int, max_tokens: int, scheduler: Scheduler) -> Request:
    """Return a request of its own prompt, so that nothing is shared."""
    limit = max_total_tokens(
        PROMPT,
        max_tokens,
        max_model_len=100_000,
        num_blocks=scheduler.pool.num_blocks,
        block_size=BLOCK_SIZE,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = [number, *range(PROMPT - 1)]
    return Request(f"r{number}", prompt, params, max_total_tokens=limit)


def hash_us(num_blocks: int = 4096) -> float:
    """Return microseconds a block to hash a long prompt."""
    tokens = list(range(num_blocks * BLOCK_SIZE))
    start = time.process_time()
    BlockChain(BLOCK_SIZE).extend(tokens, num_blocks)
    return 1e6 * (time.process_time() - start) / num_blocks


if __name__ == "__main__":
    main()
