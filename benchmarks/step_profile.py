"""Where a step's time goes on a CPU: work by part, from XLA's own profile.

    python -m benchmarks.step_profile CHECKPOINT --dtype float32

Every instruction of the compiled step says which functions it was traced in, and XLA's
profile says what each one took. Both together give the work of each part of a step, in
milliseconds of one core: the process keeps to one, since what the helping threads of a
parallel instruction do is not in the profile. So the sum is the step's work, and on n
cores the step takes at least an n-th of it. `--cores` times the step on all of them.
"""

# pyright: reportPrivateImportUsage=false

import argparse
import collections
import dataclasses
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024

PARTS = (
    # The part of an instruction is the first whose function is in its stack.
    ("attention: read keys", ("_read_tiles",)),
    ("attention: single queries", ("_single_queries",)),
    ("attention: query tiles", ("_query_tiles",)),
    ("attention: rest", ("paged_attention",)),
    ("write keys", ("write_kv",)),
    ("sampling", ("sample", "_prompt_logprobs")),
    ("logits", ("_masked_logits",)),
    ("norms", ("RMSNorm.__call__",)),
    ("rope", ("apply_rope",)),
    ("products", ("multiply",)),
    ("activation", ("MLP.__call__",)),
)
_CONTROL = ("while", "conditional", "call")  # they hold other instructions


class Case(NamedTuple):
    """A batch: its bucket, and each row's tokens and kv_len."""

    rows: int
    tokens: int
    q_lens: list[int]
    kv_lens: list[int]


CASES = {
    "decode32": Case(32, 32, [1] * 32, [300] * 32),
    "decode1": Case(1, 1, [1], [300]),
    "prefill256": Case(32, 256, [256], [256]),
    "mixed256": Case(32, 256, [1] * 24 + [232], [300] * 24 + [232]),
}


def make_batch(case: Case, vocab_size: int) -> tuple[Any, Any]:
    """Return a batch of random tokens and its rows; blocks lie all over the pool."""
    import jax.numpy as jnp
    import numpy as np

    from jaxkv.device.rows import init_rows
    from jaxkv.engine.batch import BatchBuilder, Bucket

    bucket = Bucket(rows=case.rows, tokens=case.tokens)
    builder = BatchBuilder(
        buckets=(bucket,),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks(),
        max_num_seqs=case.rows,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=vocab_size,
    )
    rows = init_rows(case.rows, builder.table_width, MAX_MODEL_LEN, vocab_size)
    tables = np.array(rows.block_tables)
    batch = builder.empty(bucket)
    rng = np.random.default_rng(0)
    batch.token_ids[:] = rng.integers(vocab_size, size=case.tokens)
    free = iter(rng.permutation(np.arange(1, num_blocks())))
    begin = 0
    for row, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        blocks = [next(free) for _ in range(-(-kv_len // BLOCK_SIZE))]
        tables[row, : len(blocks)] = blocks
        batch.rows[row] = row
        positions = np.arange(kv_len - q_len, kv_len)
        end = begin + q_len
        batch.positions[begin:end] = positions
        batch.slot_mapping[begin:end] = (
            tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        batch.kv_lens[row] = kv_len
        batch.cu_q_lens[row + 1 :] = end
        batch.sample_indices[row] = end - 1
        batch.num_samples[row] = 1
        begin = end
    return batch, rows._replace(block_tables=jnp.asarray(tables))


def num_blocks() -> int:
    """Return the blocks of a pool that holds the largest case."""
    return 1 + max(
        sum(-(-kv_len // BLOCK_SIZE) for kv_len in case.kv_lens)
        for case in CASES.values()
    )


def parts_of(hlo_text: str) -> dict[str, str | None]:
    """Return the part of each instruction of a compiled module by its name.

    None for those that only hold others. An instruction of no part is "rest".
    """
    functions = dict(
        re.findall(r'^(\d+) "(.*)"$', _table(hlo_text, "FunctionNames"), re.M)
    )
    locations = {
        place: functions.get(function, "")
        for place, function in re.findall(
            r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+)",
            _table(hlo_text, "FileLocations"),
            re.M,
        )
    }
    frames = {
        frame: (locations.get(place, ""), parent)
        for frame, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}",
            _table(hlo_text, "StackFrames"),
            re.M,
        )
    }

    def stack(frame: str) -> Iterable[str]:
        while frame in frames:
            function, parent = frames[frame]
            yield function
            frame = str(int(parent or 1) - 1)  # printed one too high; 0 is none

    def part(frame: str) -> str:
        names = list(stack(frame))
        for name, markers in PARTS:
            if any(n == m or n.startswith(f"{m}.<") for n in names for m in markers):
                return name
        return "rest"

    fused: dict[str, str] = {}  # the frame of what a fusion computes, by its name
    result: dict[str, str | None] = {}
    computation = ""
    for line in hlo_text.splitlines():
        if opening := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            computation = opening[1]
        found = re.match(r" *(ROOT )?%([\w.-]+) = .*?[\])}] ([\w-]+)\((.*)$", line)
        if not found:
            continue
        is_root, name, opcode, rest = found.groups()
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        calls = re.search(r"calls=%([\w.-]+)", rest)
        place = frame[1] if frame else fused.get(calls[1], "") if calls else ""
        if place and (is_root or computation not in fused):
            fused[computation] = place
        result[name] = None if opcode in _CONTROL else part(place)
    return result


def _table(hlo_text: str, title: str) -> str:
    found = re.search(rf"^{title}\n(.*?)\n\n", hlo_text, re.M | re.S)
    return found[1] if found else ""


def profile(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the milliseconds that each instruction took in one run."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    total: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        for line in plane.lines:
            if (line.name or "").startswith("tf_XLA"):
                for event in line.events:
                    total[event.name] += event.duration_ns
    return {name: 1e-6 * took / repeats for name, took in total.items()}


def by_part(
    took: Mapping[str, float], parts: Mapping[str, str | None]
) -> dict[str, float]:
    """Sum instructions' times by part, the largest first."""
    total: dict[str, float] = collections.defaultdict(float)
    for name, milliseconds in took.items():
        part = parts.get(name)
        if part is not None:
            total[part] += milliseconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def main() -> None:
    """Profile the cases and print a JSON line for each."""
    arguments = _arguments()
    if not arguments.cores:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    import jax
    import jax.numpy as jnp

    from jaxkv.config import CacheConfig
    from jaxkv.device.cache import init_cache
    from jaxkv.device.llama import param_shapes
    from jaxkv.device.step import make_step
    from jaxkv.engine.checkpoint import load_config, load_params
    from jaxkv.engine.memory_advice import start_collapsing

    config = load_config(arguments.checkpoint)
    config = dataclasses.replace(config, dtype=arguments.dtype)
    loaded = load_params(arguments.checkpoint, config, arguments.dtype)
    params = tuple(jnp.asarray(loaded[name]) for name in param_shapes(config))
    cache = init_cache(
        CacheConfig(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks(),
            block_size=BLOCK_SIZE,
            kv_cache_dtype=arguments.kv_cache_dtype or arguments.dtype,
        )
    )
    step = jax.jit(
        make_step(
            config,
            num_token_ids=config.vocab_size,
            attention_implementation="auto",
        ),
        donate_argnums=(1, 2),
    )
    start_collapsing(jax.tree.leaves((params, cache))).join()  # as the engine does
    for name in arguments.cases:
        batch, rows = make_batch(CASES[name], config.vocab_size)
        compiled = step.lower(params, cache, rows, batch).compile()
        kept = [rows]

        def run(compiled=compiled, batch=batch, kept=kept) -> None:
            nonlocal cache
            output, cache, kept[0] = compiled(params, cache, kept[0], batch)
            jax.block_until_ready((output, cache))

        run()
        seconds = []
        for _ in range(arguments.repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        line = {
            "case": name,
            "dtype": arguments.dtype,
            "cores": len(os.sched_getaffinity(0)),
            "step_ms": round(1e3 * statistics.median(seconds), 2),
            "step_ms_min": round(1e3 * min(seconds), 2),
        }
        if not arguments.cores:
            took = profile(run, arguments.repeats)
            parts = parts_of(compiled.as_text() or "")
            found = by_part(took, parts)
            line["parts_ms"] = {part: round(ms, 2) for part, ms in found.items()}
            line["sum_ms"] = round(sum(found.values()), 2)
            if arguments.instructions:
                top = sorted(took, key=lambda n: -took[n])[: arguments.instructions]
                line["instructions"] = {
                    n: (parts.get(n, "?"), round(took[n], 3)) for n in top
                }
        print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder that `jaxkv convert` wrote")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", help="default: the dtype")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--instructions", type=int, default=0)
    parser.add_argument("--cores", action="store_true", help="time on all cores only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
