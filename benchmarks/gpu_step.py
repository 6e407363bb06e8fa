"""What a decoding step of Llama-3.1-8B does on an H200, read off the compiled program.

    python -m benchmarks.gpu_step --rows 1 32 256 --kv-len 2048

compiles the step in bfloat16 for each number of rows, without a GPU, and prints which
kernels it has between two attention kernels and outside, and what each of them moves.
Beneath, for all rows decoding greedily at one length: the bytes that any step has to
move, those that this one moves, and what either takes. Nothing is measured: XLA tunes
products on the device, so there some of them may be other kernels.

The floor is the weights that a step reads once (the embedding only at its rows), K and
V of every row, and the logits, written and read. The last line of each is JSON.
"""

import argparse
import collections
import itertools
import json
import math

import jax

from benchmarks import gpu_target, llama_8b
from benchmarks.compiled_kernels import (
    ATTENTION,
    Kernel,
    kernels,
    num_bytes,
)
from benchmarks.hlo import Instruction
from jaxkv.device.llama import param_shapes

BANDWIDTH = 4.8e12  # bytes a second, by its data sheet
RATE = 989e12  # operations a second of dense bfloat16, likewise


def attention_kernel(
    rows: int, kv_len: int, x: Instruction, operands: list[Instruction]
) -> Kernel:
    """Say what one attention kernel moves for rows of one length.

    Args:
        rows: How many.
        kv_len: Tokens that each attends to.
        x: The call.
        operands: Queries, the pools of K and V, block tables and whatever else.
    """
    queries, k_pool, v_pool, tables, *others = operands
    (_, (_, kv_heads, block_size, head_dim)), *_ = k_pool.arrays()
    # Of a pool the rows' blocks, of the tables their ids.
    num_blocks = math.ceil(kv_len / block_size)
    read = num_bytes([*queries.arrays(), *(y for z in others for y in z.arrays())])
    for pool in (k_pool, v_pool):
        [(dtype, _)] = pool.arrays()
        shape = (rows, num_blocks, kv_heads, block_size, head_dim)
        read += num_bytes([(dtype, shape)])
    [(dtype, _)] = tables.arrays()
    read += num_bytes([(dtype, (rows, num_blocks))])
    [(_, shape)] = queries.arrays()
    operations = 4 * math.prod(shape) * kv_len
    return Kernel(ATTENTION, x.result, read, num_bytes(x.arrays()), operations)


def floor_bytes(rows: int, kv_len: int, num_layers: int) -> dict[str, int]:
    """Return the bytes that any step of so many rows has to move, by what they are."""
    shapes = param_shapes(llama_8b.model_config(num_layers))
    embedding = shapes.pop("embed_tokens.weight")
    cache = llama_8b.cache_config(num_layers)
    token = 2 * num_layers * cache.num_kv_heads * cache.head_dim * 2
    return {
        "weights": 2 * sum(map(math.prod, shapes.values())) + 2 * rows * embedding[1],
        "keys and values": rows * (kv_len + 1) * token,  # one of them is written
        "logits": 2 * rows * embedding[0] * 4,
    }


def by_place(launches: list[Kernel]) -> tuple[list[list[Kernel]], list[Kernel]]:
    """Cut launches behind each attention kernel.

    Returns:
        What runs from behind one attention kernel up to the next one, for all pairs of
        neighbours; and everything else.
    """
    ends = [i + 1 for i, x in enumerate(launches) if x.kind == ATTENTION]
    between = [launches[start:end] for start, end in itertools.pairwise(ends)]
    return between, launches[: ends[0]] + launches[ends[-1] :]


def table(launches: list[Kernel]) -> list[str]:
    """Return a table's lines; kernels alike share one."""
    lines = [
        f"{'kind':<12}{'how many':>9}{'read':>12}{'written':>12}{'us':>8}  what",
    ]
    for kernel, count in collections.Counter(launches).items():
        read, written = (f"{x / 1e6:.3f} MB" for x in (kernel.read, kernel.written))
        time = 1e6 * kernel.seconds(BANDWIDTH, RATE)
        lines.append(
            f"{kernel.kind:<12}{count:>9}{read:>12}{written:>12}{time:>8.2f}"
            f"  {kernel.what}"
        )
    return lines


def report(rows: int, kv_len: int, num_layers: int, launch: float) -> dict:
    """Compile the step of so many rows, print what it does, and return the figures."""
    step = gpu_target.call(
        llama_8b.decode_step,
        rows=rows,
        num_layers=num_layers,
        # As many as they fill: XLA computes anew what a device has no memory to keep.
        num_blocks=1 + rows * math.ceil((kv_len + 1) / 16),
    )
    launches = kernels(
        step["text"], lambda x, operands: attention_kernel(rows, kv_len, x, operands)
    )
    between, outside = by_place(launches)
    alike = collections.Counter(tuple(sorted(part)) for part in between)
    print(
        f"\n{rows} rows, {kv_len} tokens each, {num_layers} layers, "
        f"jax {jax.__version__}"
    )
    print(f"\nBetween two attention kernels, {len(between)} times, {len(alike)} kinds:")
    print("\n".join(table(between[len(between) // 2])))
    print("\nBefore the first and behind the last of them:")
    print("\n".join(table(outside)))
    floor = floor_bytes(rows, kv_len, num_layers)
    moved = sum(x.moved for x in launches)
    operations = sum(x.operations for x in launches)
    seconds = sum(x.seconds(BANDWIDTH, RATE) for x in launches)
    least = max(sum(floor.values()) / BANDWIDTH, operations / RATE)
    figures = {
        "rows": rows,
        "kv_len": kv_len,
        "layers": num_layers,
        "jax": jax.__version__,
        "kernels": len(launches),
        "kernels_per_layer": len(between[0]),
        "floor_bytes": floor,
        "moved_bytes": moved,
        "moved_by": {
            kind: sum(x.moved for x in launches if x.kind == kind)
            for kind in sorted({x.kind for x in launches})
        },
        "operations": operations,
        "floor_ms": 1e3 * sum(floor.values()) / BANDWIDTH,
        "floor_with_operations_ms": 1e3 * least,
        "kernels_ms": 1e3 * seconds,
        "with_launches_ms": 1e3 * (seconds + launch * len(launches)),
        "temporary_bytes": step["temp_bytes"],
    }
    print(
        f"\nfloor: {sum(floor.values()) / 1e9:.2f} GB, {figures['floor_ms']:.2f} ms at "
        f"{BANDWIDTH / 1e12} TB/s; with its operations at {RATE / 1e12:.0f} TFLOP/s at "
        f"least {1e3 * least:.2f} ms\n"
        f"moved: {moved / 1e9:.2f} GB by {len(launches)} kernels, "
        f"{1e3 * seconds:.2f} ms (of bytes or of operations, kernel by kernel)\n"
        f"with {1e6 * launch:.1f} us a launch: {figures['with_launches_ms']:.2f} ms"
    )
    print(json.dumps(figures))
    return figures


def main() -> None:
    """Report the step for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--kv-len", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=llama_8b.NUM_LAYERS)
    parser.add_argument(
        "--launch-us",
        type=float,
        default=1.5,
        help="what a kernel takes to start behind the one it waits for (not measured)",
    )
    arguments = parser.parse_args()
    for rows in arguments.rows:
        report(rows, arguments.kv_len, arguments.layers, 1e-6 * arguments.launch_us)


if __name__ == "__main__":
    main()
