"""Which shapes to compile: padding and throughput of several ladders of buckets.

    python -m benchmarks.bucket_ladders CHECKPOINT

Each ladder has an engine of its own, which runs the same trace, all requests at once;
the engines alternate, and medians are compared. The tokens must not depend on the
ladder (up to ties, which are counted). One JSON line for each ladder:

    variants, compile_seconds    what there is to compile at a first start
    padding_percent              tokens that were computed for nobody
    output_tokens_per_s          median over the repeats
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.engine import TRACE, sampling_params
from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.engine.batch import Bucket, Ladder, few_buckets, make_buckets
from jaxkv.engine.checkpoint import load_config, load_params


def coarse(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Powers of four, and the most: of rows that decode, of tokens beside all rows."""
    rows = [4**i for i in range(max_num_seqs) if 4**i < max_num_seqs]
    tokens = [max_num_batched_tokens]
    while tokens[-1] > 4 * max_num_seqs:
        tokens.append(tokens[-1] // 4)
    return tuple(Bucket(n, n) for n in (*rows, max_num_seqs)) + tuple(
        Bucket(max_num_seqs, n) for n in reversed(tokens) if n > max_num_seqs
    )


def fine(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Bucket, ...]:
    """Multiples of four rows that decode, and of tokens half-way stops too."""
    every = {*make_buckets(max_num_seqs, max_num_batched_tokens)}
    most = max(bucket.rows for bucket in every)
    every |= {Bucket(n, n) for n in range(4, most + 1, 4)}
    tokens = max(bucket.tokens for bucket in every)
    while tokens > most:
        every.add(Bucket(most, max(most, 3 * tokens // 4)))
        tokens //= 2
    return tuple(sorted(every, key=lambda bucket: (bucket.tokens, bucket.rows)))


LADDERS: dict[str, Ladder] = {
    "coarse": coarse,
    "few": few_buckets,
    "default": make_buckets,
    "fine": fine,
}


def main() -> None:
    """Run the trace with every ladder and print the lines."""
    arguments = _arguments()
    trace = json.loads(Path(arguments.trace).read_text())["traces"]
    requests = [
        (request["id"], request["prompt"], choose(request, seed, arguments.temperature))
        for seed, request in enumerate(trace[arguments.name])
    ]
    model_config = load_config(arguments.checkpoint)
    params = load_params(arguments.checkpoint, model_config, dtype=arguments.dtype)
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in trace[arguments.name])
    config = EngineConfig(
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=longest,
        num_blocks=arguments.num_blocks,
    )
    engines = {}
    for name in dict.fromkeys(("default", *arguments.ladders)):
        ladder = LADDERS[name]
        with mock.patch.multiple(
            "jaxkv.engine.engine", few_buckets=ladder, make_buckets=ladder
        ):
            engines[name] = Engine.from_params(params, model_config, config)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    padding, tokens = {}, {}
    for name, engine in engines.items():  # not counted: touches every page
        _, padding[name], tokens[name] = run(engine, requests)
    for _ in range(arguments.repeats):
        for name, engine in engines.items():
            rates[name].append(run(engine, requests)[0])
    for name, engine in engines.items():
        stats = engine.stats()
        line = {
            "benchmark": "bucket_ladders",
            "trace": f"{Path(arguments.trace).name}:{arguments.name}",
            "temperature": arguments.temperature,
            "ladder": name,
            "variants": len(engine._builder.buckets),
            "compile_seconds": round(stats.compile_seconds, 1),
            "padding_percent": round(100 * padding[name], 1),
            "output_tokens_per_s": round(statistics.median(rates[name]), 1),
            "other_than_default": sum(
                tokens[name][key] != tokens["default"][key] for key in tokens[name]
            ),
        }
        print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument(
        "--ladders",
        nargs="+",
        choices=sorted(LADDERS),
        default=list(LADDERS),
        help="which to compare with the default (%(default)s)",
    )
    parser.add_argument("--trace", default=TRACE, help="a JSON file of traces")
    parser.add_argument("--name", default="mixed", help="which of them (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0: with top_p 0.95 and a seed for each request",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def choose(request: dict[str, Any], seed: int, temperature: float) -> SamplingParams:
    """How a request of the trace chooses its tokens: always as many."""
    greedy = sampling_params(request)
    if temperature == 0.0:
        return greedy
    return dataclasses.replace(greedy, temperature=temperature, top_p=0.95, seed=seed)


def run(
    engine: Engine, requests: list[tuple[str, list[int], SamplingParams]]
) -> tuple[float, float, dict[str, list[int]]]:
    """Run a trace; return output tokens a second, the padding's share, the tokens."""
    engine.reset_prefix_cache()
    dispatch = engine._runner.dispatch
    computed = padded = 0

    def counting(batch, num_steps=1):
        nonlocal computed, padded
        computed += int(np.asarray(batch.cu_q_lens)[-1])
        padded += len(batch.token_ids)
        return dispatch(batch, num_steps)

    for request in requests:
        engine.add_request(*request)
    found: dict[str, list[int]] = {}
    start = time.perf_counter()
    with mock.patch.object(engine._runner, "dispatch", counting):
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    num_tokens = sum(map(len, found.values()))
    return num_tokens / seconds, 1 - computed / padded, found


if __name__ == "__main__":
    main()
