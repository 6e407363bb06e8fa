"""The attention kernels on a GPU: checked, then timed beside what else there is.

    python -m benchmarks.kernels --quick --output build/kernels

Each case's outputs are first compared with the reference in float32; what is wrong is
reported and not timed. Times are the device's, of many launches that rotate between
inputs. One JSON line a case goes to stdout, then a table; --output writes both and a
plot into a folder. Exit status: 1 if one of our kernels failed, 2 if none can run or be
timed here.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from benchmarks import device_time, kernel_cases, kernel_peers, kernel_report
from benchmarks.kernel_cases import Case, Inputs
from pallas_kernels.target import check_hopper

TOLERANCE = {"bfloat16": 5e-2, "float16": 6e-3}
"""Largest error of a token's output, as a share of that output's root mean square.

Relative, since outputs over n random keys are about 1.6 / sqrt(n) large: at 8192 keys
an absolute tolerance of 0.02 would let zeros pass. In bfloat16 rounding gives 0.01 to
0.03, one key of 8192 left out 0.07, a block of 16 left out 0.14.
"""

H200_BYTES_PER_S = 4.8e12
H200_OPERATIONS_PER_S = 989e12  # bfloat16, dense
PEAK_BYTES_PER_S = {
    "NVIDIA H200": H200_BYTES_PER_S,
    "NVIDIA H100 80GB HBM3": 3.35e12,  # SXM
}
"""Theoretical bandwidth by JAX's `device_kind`."""

PEERS = tuple(
    name for name in kernel_peers.IMPLEMENTATIONS if name != kernel_peers.OURS
)
_SPARE_BYTES = 4 * 2**30
_GATHERED_BYTES = 256 * 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the command line names; return the exit status."""
    arguments, cases = _arguments(argv)
    if arguments.list:
        print("\n".join(cases))
        return 0
    setup: dict[str, Any] = {"seed": arguments.seed, "interpret": None, "copy": None}
    if arguments.interpret:
        setup["interpret"] = plgpu.InterpretGPUParams()
    else:
        refusal = _refusal()
        if refusal is not None:
            _say(refusal)
            return 2
        cases = _those_that_fit(cases)
        try:
            setup["copy"] = _measured_copy()
        except RuntimeError as error:
            _say(f"Kernels can be checked here and not be timed: {error}")
    records = []
    try:
        for number, (name, case) in enumerate(cases.items(), start=1):
            _say(f"[{number}/{len(cases)}] {name}")
            records.append(run_case(name, case, **setup))
            print(json.dumps(records[-1]), flush=True)
    except KeyboardInterrupt:
        _say(f"Interrupted after {len(records)} of {len(cases)} cases.")
        return 130
    print(f"\n{kernel_report.table(records)}", flush=True)
    if arguments.output is not None:
        for remark in kernel_report.write(records, arguments.output):
            _say(remark)
    failed = [record["case"] for record in records if record["problem"] is not None]
    if failed:
        _say(f"Failed: {', '.join(failed)}.")
    if failed:
        return 1
    return 2 if setup["copy"] is None and not arguments.interpret else 0


def _arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, dict[str, Case]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="some cases, not all")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(2**31),
        help="of the inputs; without, others each time",
    )
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run tiny cases in Pallas' interpreter, without times",
    )
    arguments = parser.parse_args(argv)
    cases = kernel_cases.INTERPRETED if arguments.interpret else kernel_cases.grid()
    if arguments.quick and not arguments.interpret:
        cases = {name: cases[name] for name in kernel_cases.QUICK}
    if arguments.cases:
        unknown = [name for name in arguments.cases if name not in cases]
        if unknown:
            parser.error(f"no such cases: {', '.join(unknown)}; --list prints them")
        cases = {name: cases[name] for name in arguments.cases}
    return arguments, cases


def _refusal() -> str | None:
    """Say why the kernels cannot run here, if so."""
    try:
        check_hopper()
    except NotImplementedError as error:
        return f"The kernels cannot run on {error}. --interpret simulates tiny cases."
    except (RuntimeError, AssertionError) as error:  # JAX, asked for CUDA it has not
        return f"The kernels need an NVIDIA Hopper GPU; JAX finds no device. {error}"
    return None


def _those_that_fit(cases: Mapping[str, Case]) -> dict[str, Case]:
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    fitting = {}
    for name, case in cases.items():
        needed = case.pool_bytes + _SPARE_BYTES
        if needed <= limit:
            fitting[name] = case
        else:
            _say(
                f"Left out {name}: it needs {needed / 1e9:.0f} GB and JAX has "
                f"{limit / 1e9:.0f} GB."
            )
    return fitting


def _measured_copy() -> device_time.Copy:
    copy = device_time.measure_copy()
    _say(
        f"A copy of 1 GiB by {copy.timer}: {copy.bytes_per_s / 1e12:.2f} TB/s read and "
        f"written; by the host's clock {copy.host_bytes_per_s / 1e12:.2f} TB/s."
    )
    if not 0.9 < copy.bytes_per_s / copy.host_bytes_per_s < 1.2:
        _say("These differ too much: do not trust the times below.")
    return copy


def run_case(
    name: str,
    case: Case,
    *,
    seed: int,
    interpret: Any = None,
    copy: device_time.Copy | None = None,
) -> dict[str, Any]:
    """Check and time all implementations in one case; return its record.

    Args:
        name: The case's.
        case: Its shapes.
        seed: Of its inputs.
        interpret: `plgpu.InterpretGPUParams` to simulate the kernels on a CPU.
        copy: What the card copies, and the timer; None: times are not taken.
    """
    num_sets = 1 if copy is None else case.num_sets
    inputs = kernel_cases.make_inputs(case, seed, num_sets)
    expected = expected_outputs(case, inputs, -1)
    outcomes = {}
    for implementation in kernel_peers.IMPLEMENTATIONS:
        outcome = measure(implementation, case, inputs, expected, interpret, copy)
        outcomes[implementation] = outcome
        if outcome["problem"] is not None:
            _say(f"  {implementation}: {outcome['problem']}")
    ours = outcomes.pop(kernel_peers.OURS)
    record = _described(name, case) | ours
    record |= {"peers": outcomes, "sets": num_sets, "seed": seed}
    return record | shares(record, copy)


def _described(name: str, case: Case) -> dict[str, Any]:
    """Return the part of a record that is known before anything runs."""
    num_bytes = kernel_cases.moved_bytes(case)
    operations = kernel_cases.operations(case)
    limits = (num_bytes / H200_BYTES_PER_S, operations / H200_OPERATIONS_PER_S)
    return {
        "benchmark": "kernels",
        "case": name,
        "rows": len(case.rows),
        "tokens": case.tokens,
        "longest": max(kv_len for _, kv_len in case.rows),
        "q_heads": case.q_heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "block_size": case.block_size,
        "dtype": case.dtype,
        "kv_format": case.kv_format,
        "decode": case.is_decode,
        "bytes": num_bytes,
        "operations": operations,
        "predicted_h200_us": round(1e6 * max(limits), 1),
        "tolerance": TOLERANCE[case.dtype],
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def shares(record: Mapping[str, Any], copy: device_time.Copy | None) -> dict[str, Any]:
    """Return the bandwidths of the card, and which shares of them a record reached.

    `share_` is of all that a call runs, `kernel_share_` of our kernel alone.
    """
    bandwidths = {
        "copy": None if copy is None else copy.bytes_per_s,
        "peak": PEAK_BYTES_PER_S.get(record["device"]),
    }
    found: dict[str, Any] = {"timer": None if copy is None else copy.timer}
    for name, bytes_per_s in bandwidths.items():
        found[f"{name}_bytes_per_s"] = bytes_per_s
        for prefix in ("", "kernel_"):
            us = record[f"{prefix}us"]
            share = None
            if us is not None and bytes_per_s is not None:
                share = round(record["bytes"] / (1e-6 * us) / bytes_per_s, 4)
            found[f"{prefix}share_of_{name}"] = share
    us = record["us"]
    found["tera_operations_per_s"] = (
        None if us is None else round(record["operations"] / us / 1e6, 1)
    )
    return found


def measure(
    implementation: str,
    case: Case,
    inputs: Inputs,
    expected: jax.Array,
    interpret: Any,
    copy: device_time.Copy | None,
) -> dict[str, Any]:
    """Check an implementation and time it; of several settings the fastest counts.

    Args:
        implementation: One of `kernel_peers.IMPLEMENTATIONS`.
        case: What to run.
        inputs: Its arrays.
        expected: Outputs for the last set of them.
        interpret: `plgpu.InterpretGPUParams` to simulate the kernels on a CPU.
        copy: Has the timer; None: times are not taken.

    Returns:
        {error, us, kernel_us, launches, kernels, setting, problem}; the problem is
        None, or says why there is no time.
    """
    nothing: dict[str, Any] = dict.fromkeys(
        ("error", "us", "kernel_us", "launches", "kernels", "setting", "problem")
    )
    outcome = nothing
    try:
        prepare = kernel_peers.IMPLEMENTATIONS[implementation]
        for prepared in prepare(case, inputs, interpret):
            result = prepared.function(*prepared.arguments[-1])
            error = relative_error(prepared.to_tokens(result), expected)
            outcome = outcome | {"error": error if math.isfinite(error) else None}
            if not error <= TOLERANCE[case.dtype]:  # a NaN is not less
                wrong = f"error {error:.4f}, more than {TOLERANCE[case.dtype]}"
                return nothing | {"error": outcome["error"], "problem": wrong}
            if copy is None:
                continue
            taken = device_time.time_launches(
                copy.timer, prepared.function, itertools.cycle(prepared.arguments)
            )
            us = round(1e6 * taken.seconds, 2)
            if outcome["us"] is not None and outcome["us"] <= us:
                continue
            mosaic = taken.mosaic_seconds
            outcome = outcome | {
                "us": us,
                "kernel_us": None if mosaic is None else round(1e6 * mosaic, 2),
                "launches": taken.num_launches,
                "kernels": taken.num_kernels,
                "setting": prepared.setting or None,
            }
    except Exception as error:  # other people's code: whatever it is, say it and go on
        first_line = (str(error).splitlines() or [""])[0]
        return nothing | {"problem": f"{type(error).__name__}: {first_line[:300]}"}
    return outcome


def expected_outputs(case: Case, inputs: Inputs, index: int) -> jax.Array:
    """Return the reference's outputs in float32, for one set of the inputs.

    A few tokens at a time, each as a row of its own that ends at it: the reference
    gathers every key for every token.
    """
    q_lens = [q_len for q_len, _ in case.rows]
    row = np.repeat(np.arange(len(case.rows)), q_lens)
    kv_ends = np.concatenate(
        [np.arange(kv_len - q_len, kv_len) + 1 for q_len, kv_len in case.rows]
    )
    slots = case.width * case.block_size
    gathered = 4 * slots * case.kv_heads * case.head_dim
    return _reference(
        inputs.q[index],
        inputs.k_blocks,
        inputs.v_blocks,
        inputs.block_tables[index][row],
        jnp.asarray(kv_ends, jnp.int32),
        inputs.scales,
        scale=case.scale,
        batch_size=min(case.tokens, max(1, _GATHERED_BYTES // gathered)),
    )


@functools.partial(jax.jit, static_argnames=("scale", "batch_size"))
def _reference(
    q, k_blocks, v_blocks, block_tables, kv_ends, scales, *, scale, batch_size
):
    def one_token(token):
        q, table, kv_end = token
        return pallas_kernels.paged_attention_reference(
            q.astype(jnp.float32)[None],
            k_blocks,
            v_blocks,
            table[None],
            kv_end[None],
            jnp.array([0, 1], jnp.int32),
            **scales,
            scale=scale,
        )[0]

    # A GPU's default for float32 is TF32, which has 11 bits.
    with jax.default_matmul_precision("highest"):
        return jax.lax.map(one_token, (q, block_tables, kv_ends), batch_size=batch_size)


@jax.jit
def _relative_errors(out: jax.Array, expected: jax.Array) -> jax.Array:
    size = jnp.sqrt(jnp.mean(expected**2, axis=(1, 2)))
    return jnp.max(jnp.abs(out.astype(jnp.float32) - expected), axis=(1, 2)) / size


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """Return the largest error of a token, as a share of its root mean square."""
    assert out.shape == expected.shape, (out.shape, expected.shape)
    return float(jnp.max(_relative_errors(out, expected)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
