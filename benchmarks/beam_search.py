"""How many blocks beams save by sharing them.

    python -m benchmarks.beam_search CHECKPOINT

Prompts of a trace are searched with several beam widths. In every step the blocks that
are held are counted, and those that would be if no beam shared any. First a search of
one beam must give the greedy tokens; then one JSON line is printed for each width.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from jaxkv import LLM, BeamSearchParams, SamplingParams
from jaxkv.engine.engine import Engine

TRACE = Path(__file__).parent / "traces" / "dev.json"


def main() -> None:
    """Print one line for each beam width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("--trace", default=TRACE, help="a JSON file of traces")
    parser.add_argument("--name", default="mixed", help="which of them (%(default)s)")
    parser.add_argument("--requests", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--num-blocks", type=int, default=1024, help="(%(default)s)")
    parser.add_argument("--beam-width", type=int, nargs="+", default=[2, 4, 6])
    arguments = parser.parse_args()
    trace = json.loads(Path(arguments.trace).read_text())["traces"][arguments.name]
    prompts = [request["prompt"] for request in trace[: arguments.requests]]
    llm = LLM(
        arguments.checkpoint,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        max_model_len=max(map(len, prompts)) + arguments.max_tokens,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,  # what different prompts share is not counted
        warmup="lazy",
    )
    check_one_beam(llm, prompts[:2])
    for width in arguments.beam_width:
        params = BeamSearchParams(beam_width=width, max_tokens=arguments.max_tokens)
        line = {
            "benchmark": "beam_search",
            "trace": f"{Path(arguments.trace).name}:{arguments.name}",
            "model": Path(arguments.checkpoint).name,
            "block_size": arguments.block_size,
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "requests": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            **search(llm.engine, prompts, params),
        }
        print(json.dumps(line), flush=True)


def check_one_beam(llm: LLM, prompts: list[list[int]]) -> None:
    """Check that a search of one beam is greedy decoding."""
    greedy = llm.generate(
        prompts, SamplingParams(max_tokens=16, temperature=0.0), use_tqdm=False
    )
    params = BeamSearchParams(beam_width=1, max_tokens=16, early_stopping=True)
    beams = llm.beam_search(prompts, params, use_tqdm=False)
    for one, other in zip(greedy, beams, strict=True):
        if one.outputs[0].token_ids != list(other.outputs[0].token_ids):
            raise SystemExit("one beam does not give the greedy tokens")


def search(
    engine: Engine, prompts: list[list[int]], params: BeamSearchParams
) -> dict[str, Any]:
    """Search every prompt, all at once; return the blocks that were held."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    scheduler = engine.scheduler
    schedule = scheduler.schedule
    held: list[tuple[int, int]] = []

    def observed() -> Any:
        plan = schedule()
        held.append((scheduler.pool.num_held, scheduler.block_tables.num_references))
        return plan

    scheduler.schedule = observed
    before = engine.stats()
    start = time.perf_counter()
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    scheduler.schedule = schedule
    blocks, references = map(sum, zip(*held, strict=True))
    return {
        "beam_width": params.beam_width,
        "max_tokens": params.max_tokens,
        "best_output_tokens": num_tokens,
        "steps": len(held),
        "seconds": round(seconds, 2),
        "preemptions": engine.stats().num_preemptions - before.num_preemptions,
        "peak_blocks": max(count for count, _ in held),
        "peak_blocks_without_sharing": max(count for _, count in held),
        "saved_percent": round(100 * (1 - blocks / references), 1),
    }


if __name__ == "__main__":
    main()
