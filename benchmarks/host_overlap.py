"""How much of the host's work is hidden behind the device's.

    python -m benchmarks.host_overlap

A toy model decodes in all rows, in turns and with `async_scheduling`, each with and
without a delay planted in every `schedule`. In turns the delay is paid in full; what
asynchronous stepping pays of it is what it does not hide. The four ways alternate, and
medians are compared. First their tokens are compared, which must be equal.

Behind a step no more can be hidden than it takes: `--layers` has to make it longer than
the host's own work (1 to 2 ms with 32 rows) and the delay together.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.testing import tiny_llama

PROMPT_LEN = 8


def main() -> None:
    """Measure and print one JSON line."""
    arguments = _arguments()
    engines = {
        async_scheduling: make_engine(async_scheduling, arguments)
        for async_scheduling in (False, True)
    }
    ways = [(mode, delay) for mode in engines for delay in (0.0, arguments.delay_ms)]
    tokens = [run(engines[mode], delay, arguments)[1] for mode, delay in ways]
    assert all(found == tokens[0] for found in tokens), "the modes' tokens differ"
    samples: dict[tuple[bool, float], list[float]] = {way: [] for way in ways}
    for _ in range(arguments.repeats):
        for mode, delay in ways:
            samples[mode, delay].append(run(engines[mode], delay, arguments)[0])
    step_ms = {way: statistics.median(found) for way, found in samples.items()}
    paid = {
        mode: step_ms[mode, arguments.delay_ms] - step_ms[mode, 0.0] for mode in engines
    }
    line = {
        "benchmark": "host_overlap",
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "rows": arguments.rows,
        "delay_ms": arguments.delay_ms,
        "step_ms_in_turns": round(step_ms[False, 0.0], 3),
        "step_ms_async": round(step_ms[True, 0.0], 3),
        "paid_ms_in_turns": round(paid[False], 3),
        "paid_ms_async": round(paid[True], 3),
        "hidden_percent": round(100 * (1 - paid[True] / paid[False]), 1),
    }
    print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens for each")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def make_engine(async_scheduling: bool, arguments: argparse.Namespace) -> Engine:
    """Return an engine of a toy model whose step takes some milliseconds."""
    params, config = tiny_llama(
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
    )
    longest = PROMPT_LEN + arguments.tokens
    return Engine.from_params(
        params,
        config,
        EngineConfig(
            max_num_seqs=arguments.rows,
            max_num_batched_tokens=arguments.rows * PROMPT_LEN,
            max_model_len=longest,
            num_blocks=1 + arguments.rows * -(-longest // 16),
            enable_prefix_caching=False,
            async_scheduling=async_scheduling,
        ),
    )


def run(
    engine: Engine, delay_ms: float, arguments: argparse.Namespace
) -> tuple[float, list[list[int]]]:
    """Decode in all rows; return the milliseconds of a step, and the tokens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True
    )
    for row in range(arguments.rows):
        engine.add_request(str(row), rng.integers(0, 128, PROMPT_LEN).tolist(), params)
    schedule = engine.scheduler.schedule

    def delayed():
        time.sleep(delay_ms / 1000)
        return schedule()

    engine.scheduler.schedule = delayed
    found: dict[str, Sequence[int]] = {}
    before, start = engine.stats().num_steps, time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    seconds = time.perf_counter() - start
    engine.scheduler.schedule = schedule
    num_steps = engine.stats().num_steps - before
    return 1000 * seconds / num_steps, [list(found[key]) for key in sorted(found)]


if __name__ == "__main__":
    main()
