"""The whole engine on a trace: throughput, latency, host time, memory and waste.

    python -m benchmarks.engine CHECKPOINT --name mixed

First a few requests are run alone and in a batch and must give the same tokens; then
the trace is run, all requests arriving at once, greedy, exact lengths; then one JSON
line is printed. The first run of the trace is not counted: it touches every page.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from jaxkv import LLM, SamplingParams
from jaxkv.engine.engine import Engine

TRACE = Path(__file__).parent / "traces" / "dev.json"


def main() -> None:
    """Run one trace and print its JSON line."""
    arguments = _arguments()
    trace = json.loads(Path(arguments.trace).read_text())["traces"]
    requests = trace[arguments.name]
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in requests)
    start = time.perf_counter()
    llm = LLM(
        arguments.checkpoint,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        kv_cache_rotation=arguments.kv_cache_rotation,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        max_model_len=max(longest, 1024),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )
    warmup_seconds = time.perf_counter() - start
    check_batching(llm.engine, trace["warmup"][:3])
    for _ in range(arguments.discard):
        run_trace(llm.engine, requests, one_at_a_time=arguments.one_at_a_time)
    for _ in range(arguments.repeats):
        result = run_trace(llm.engine, requests, one_at_a_time=arguments.one_at_a_time)
        floor = waste_floor(requests, arguments.block_size)
        line = {
            "benchmark": "engine",
            "trace": f"{Path(arguments.trace).name}:{arguments.name}",
            "model": Path(arguments.checkpoint).name,
            "dtype": llm.engine.config.dtype,
            "kv_cache_dtype": llm.engine.config.kv_cache_dtype,
            "kv_cache_rotation": llm.engine.config.kv_cache_rotation,
            "kv_bytes_per_token": llm.engine.limits.kv_bytes_per_token,
            "block_size": arguments.block_size,
            "prefix_caching": arguments.enable_prefix_caching,
            "one_at_a_time": arguments.one_at_a_time,
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "warmup_seconds": round(warmup_seconds, 1),
            **result,
            "waste_floor_percent": round(100 * floor, 2),
        }
        print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("--trace", default=TRACE, help="a JSON file of traces")
    parser.add_argument("--name", default="mixed", help="which of them (%(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help="K and V, or K:V")
    parser.add_argument("--kv-cache-rotation", action="store_true")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="a request arrives when the one before has ended, not all at once",
    )
    parser.add_argument("--discard", type=int, default=1, help="runs not counted first")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs")
    return parser.parse_args()


def sampling_params(request: dict[str, Any]) -> SamplingParams:
    """Greedy, exactly max_tokens tokens."""
    return SamplingParams(
        max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True
    )


def check_batching(engine: Engine, requests: list[dict[str, Any]]) -> None:
    """Check that a batch gives the tokens that its requests give alone."""
    together = generate(engine, requests)
    for request in requests:
        alone = generate(engine, [request])
        if alone[request["id"]] != together[request["id"]]:
            raise SystemExit(f"{request['id']}: tokens differ alone and in a batch")


def generate(engine: Engine, requests: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Run requests to the end and return their tokens."""
    for request in requests:
        engine.add_request(request["id"], request["prompt"], sampling_params(request))
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def run_trace(
    engine: Engine, requests: list[dict[str, Any]], *, one_at_a_time: bool = False
) -> dict[str, Any]:
    """Run a trace once, nothing of it cached before, and return what it took."""
    engine.reset_prefix_cache()
    before = engine.stats()
    arrived: dict[str, float] = {}
    to_come = list(requests)
    first_token: dict[str, float] = {}
    waste: list[float] = []
    full_host: list[float] = []  # share of host time in steps with every row running
    num_output_tokens = most_blocks = 0
    start = time.perf_counter()
    previous = engine.stats()
    while to_come or engine.has_unfinished_requests():
        while to_come and not (one_at_a_time and engine.has_unfinished_requests()):
            request = to_come.pop(0)
            arrived[request["id"]] = time.perf_counter() - start
            engine.add_request(
                request["id"], request["prompt"], sampling_params(request)
            )
        outputs = engine.step()
        now, stats = time.perf_counter(), engine.stats()
        for output in outputs:
            first_token.setdefault(output.request_id, now - start)
            if output.finished:
                num_output_tokens += len(output.outputs[0].token_ids)
        held = engine.scheduler.num_held_slots
        most_blocks = max(most_blocks, stats.held_blocks)
        if held:
            waste.append(engine.scheduler.num_wasted_slots / held)
        step = stats.step_seconds - previous.step_seconds
        device = stats.device_seconds - previous.device_seconds
        if len(outputs) == min(len(requests), engine.config.max_num_seqs):
            full_host.append((step - device) / step)
        previous = stats
    seconds = time.perf_counter() - start
    after = engine.stats()
    num_steps = after.num_steps - before.num_steps
    step_seconds = after.step_seconds - before.step_seconds
    device_seconds = after.device_seconds - before.device_seconds
    num_prompt_tokens = sum(len(request["prompt"]) for request in requests)
    latencies = sorted(first_token[name] - arrived[name] for name in arrived)
    return {
        "requests": len(requests),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(num_output_tokens / seconds, 1),
        "total_tokens_per_s": round(
            (num_prompt_tokens + num_output_tokens) / seconds, 1
        ),
        "ttft_ms_median": round(1e3 * statistics.median(latencies), 1),
        "ttft_ms_max": round(1e3 * latencies[-1], 1),
        "steps": num_steps,
        "step_ms": round(1e3 * step_seconds / num_steps, 2),
        "step_device_ms": round(1e3 * device_seconds / num_steps, 2),
        "step_host_ms": round(1e3 * (step_seconds - device_seconds) / num_steps, 2),
        "host_percent_all_rows_running": (
            round(100 * statistics.median(full_host), 2) if full_host else None
        ),
        "compilations": after.num_compilations - before.num_compilations,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "prefix_hit_percent": round(
            100 * (after.prefix_hits - before.prefix_hits) / num_prompt_tokens, 1
        ),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "peak_blocks": most_blocks,
        "total_blocks": after.total_blocks,
        "waste_percent": round(100 * statistics.mean(waste), 2),
    }


def waste_floor(requests: list[dict[str, Any]], block_size: int) -> float:
    """Return the waste of a scheduler that holds no block too many.

    All requests run from the first step on; each holds just the blocks that its
    computed tokens need. Averaged over steps, as the measured waste.
    """
    ratios = []
    for step in range(max(request["max_tokens"] for request in requests)):
        lengths = [
            len(request["prompt"]) + step
            for request in requests
            if step < request["max_tokens"]
        ]
        slots = sum(-(-length // block_size) * block_size for length in lengths)
        ratios.append(1 - sum(lengths) / slots)
    return statistics.mean(ratios)


if __name__ == "__main__":
    main()
