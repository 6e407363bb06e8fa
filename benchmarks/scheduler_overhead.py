"""What the scheduler costs on the host: no model, no device.

    python -m benchmarks.scheduler_overhead

Requests decode side by side with prefix caching on, and each step's `schedule` and
`commit` are timed by the process's CPU clock. Printed as one JSON line for each pool
size: milliseconds a step, microseconds to add and admit a request, and to hash a block,
and how many objects a step leaves for Python's garbage collector to find.

A small pool has room for fewer rows, so what one request costs is also measured apart
and alike in every size: short requests are added, admitted, and end after one step, a
few at a time. `request_us_fresh` is the median in a pool of free blocks,
`request_us_full` in one whose every block is cached, so that each allocation evicts;
the mean beside it has the garbage collector's runs in it.
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
BATCH = 4  # requests at a time
FRESH_BATCHES = 48  # of 16 blocks each: less than a pool of 1,000
FULL_BATCHES = 500
FILL_BLOCKS = 500  # of one request that fills the cache


def main() -> None:
    """Print one line for each pool size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=256, help="fewer where the pool has no room"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--num-blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000]
    )
    arguments = parser.parse_args()
    a_row = 1 + -(-(PROMPT + arguments.steps + 8) // BLOCK_SIZE)
    fresh = FRESH_BATCHES * BATCH * PROMPT // BLOCK_SIZE
    needed = 1 + max(a_row, fresh)
    if min(arguments.num_blocks) < needed:
        parser.error(
            f"a row of {arguments.steps} steps and the admissions need {needed} "
            f"blocks, got {min(arguments.num_blocks)}"
        )
    measure_requests(min(arguments.num_blocks))  # Python warms up
    for num_blocks in arguments.num_blocks:
        rows = min(arguments.rows, (num_blocks - 1) // a_row)
        line = measure(rows, arguments.steps, num_blocks) | measure_requests(num_blocks)
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
        scheduler.add(make_request(number, PROMPT, steps + 8, scheduler))
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
        "hash_us_a_block": round(statistics.median(hash_us() for _ in range(9)), 2),
        "garbage_objects": garbage,
    }


def measure_requests(num_blocks: int) -> dict[str, float]:
    """Return microseconds to add, admit and end a request, by the pool's state."""
    scheduler = Scheduler(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=BATCH,
        max_num_batched_tokens=max(BATCH * PROMPT, FILL_BLOCKS * BLOCK_SIZE),
        max_num_partial_prefills=BATCH,
    )
    gc.collect()
    fresh = run_batches(scheduler, 0, FRESH_BATCHES)
    number = FRESH_BATCHES * BATCH
    while scheduler.pool.num_free:
        size = BLOCK_SIZE * min(FILL_BLOCKS, scheduler.pool.num_free)
        scheduler.add(make_request(number, size, 1, scheduler))
        scheduler.commit(scheduler.schedule(), [7])
        number += 1
    gc.collect()
    full = run_batches(scheduler, number, FULL_BATCHES)
    assert scheduler.pool.num_cached == num_blocks - 1, "not every block is cached"
    return {
        "request_us_fresh": round(statistics.median(fresh), 1),
        "request_us_full": round(statistics.median(full), 1),
        "request_us_full_mean": round(statistics.mean(full), 1),
    }


def run_batches(scheduler: Scheduler, number: int, num_batches: int) -> list[float]:
    """Run batches of requests of one step; return each one's microseconds a request."""
    taken = []
    for first in range(number, number + num_batches * BATCH, BATCH):
        requests = [
            make_request(first + place, PROMPT, 1, scheduler) for place in range(BATCH)
        ]
        start = time.process_time()
        for request in requests:
            scheduler.add(request)
        scheduler.commit(scheduler.schedule(), [7] * BATCH)
        taken.append(1e6 * (time.process_time() - start) / BATCH)
        assert not scheduler.has_unfinished(), "a request did not end"
    return taken


def make_request(
    number: int, num_tokens: int, max_tokens: int, scheduler: Scheduler
) -> Request:
    """Return a request of its own prompt, so that nothing is shared."""
    limit = max_total_tokens(
        num_tokens,
        max_tokens,
        max_model_len=100_000,
        num_blocks=scheduler.pool.num_blocks,
        block_size=BLOCK_SIZE,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = [number, *range(num_tokens - 1)]
    return Request(f"r{number}", prompt, params, max_total_tokens=limit)


def hash_us(num_blocks: int = 4096) -> float:
    """Return microseconds a block to hash a long prompt."""
    tokens = list(range(num_blocks * BLOCK_SIZE))
    start = time.process_time()
    BlockChain(BLOCK_SIZE).extend(tokens, num_blocks)
    return 1e6 * (time.process_time() - start) / num_blocks


if __name__ == "__main__":
    main()
