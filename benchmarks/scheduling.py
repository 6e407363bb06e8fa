"""The scheduler under a trace, in virtual time: no model, no device.

    python -m benchmarks.scheduling
    python -m benchmarks.scheduling --trace trace.jsonl --limit 1000 --num-blocks 100000
    python -m benchmarks.scheduling --regret

Each trace, made by seed or read from a file (`request_traces.py`), is replayed against
the real scheduler with a model of a device (`step_time.py`, `simulation.py`), once for
each bandwidth and way of preemption. Printed as one JSON line each: the model, the
trace, how many prompt tokens were found, preemptions, what they lost (tokens computed
again, bytes moved, seconds), time to the first token, and throughput.

`--regret` compares the cost-based choice with an oracle that at each preemption takes
the truly cheaper of swap and recompute (`preemption_oracle.py`), and with always
swapping and always recomputing, the victims in the same order. Its lines say how much
more each lost by preemption than the oracle's run, and how much longer its run was:

    regret_percent       of the cost-based choice, at its own preemptions: in the same
                         states, what its ways lost against the oracle's
    lost_percent         of each way, seconds lost in its whole run against the oracle's
    seconds_percent      of each way, the whole run's seconds against the oracle's
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.preemption_oracle import Decided, run_with_oracle
from benchmarks.request_traces import SYNTHETIC, TracedRequest, read_trace
from benchmarks.simulation import Simulation
from benchmarks.step_time import StepTime
from benchmarks.victim_order import ByLacking, PreemptionByLacking
from jaxkv.host.preemption import Preemption
from jaxkv.host.scheduler import Scheduler

WAYS = {"auto": None, "swap": True, "recompute": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the scheduler works within; host memory has room for everything."""

    num_blocks: int = 1025
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048


def main() -> None:
    """Run what the command line says."""
    arguments = _arguments()
    times = _given(StepTime, arguments)
    limits = Limits(**_given(Limits, arguments))
    for name in arguments.trace:
        try:
            trace = load(name, arguments.seed)[: arguments.limit]
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from None
        for bandwidth in arguments.bandwidth:
            time = StepTime(**times | {"bandwidth": 1e9 * bandwidth})
            case = {"benchmark": "scheduling", "trace": Path(name).name}
            if name in SYNTHETIC:
                case["seed"] = arguments.seed
            case |= dataclasses.asdict(limits) | {"time": dataclasses.asdict(time)}
            if arguments.regret:
                lines = [compare(trace, time, limits)]
            else:
                lines = [
                    {"preemption": how, "victims": arguments.victims}
                    | simulate(trace, time, limits, how, arguments.victims)
                    for how in arguments.preemption
                ]
            for line in lines:
                text = _table_row(case | line) if arguments.table else None
                print(text or json.dumps(case | line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace",
        nargs="+",
        default=list(SYNTHETIC),
        help=f"{', '.join(SYNTHETIC)}, or JSONL files",
    )
    parser.add_argument("--seed", type=int, default=0, help="of traces that are made")
    parser.add_argument("--limit", type=int, help="requests, the first of a trace")
    parser.add_argument(
        "--bandwidth", type=float, nargs="+", default=[4, 16, 64], help="GB/s"
    )
    parser.add_argument(
        "--preemption", nargs="+", choices=list(WAYS), default=list(WAYS)
    )
    parser.add_argument(
        "--victims",
        choices=["gained", "lacking"],
        default="gained",
        help="work lost for each block gained, or for those of them that are lacking",
    )
    parser.add_argument("--regret", action="store_true", help="against the oracle")
    parser.add_argument(
        "--table", action="store_true", help="rows of a table, not JSON"
    )
    for field in (*dataclasses.fields(Limits), *dataclasses.fields(StepTime)):
        if field.name != "bandwidth":
            name = f"--{field.name.replace('_', '-')}"
            kind = type(field.default)
            parser.add_argument(name, type=kind, default=field.default)
    arguments = parser.parse_args()
    positive = {"block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"}
    for name in (*sorted(positive), "limit", "bandwidth"):
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number <= 0:
                parser.error(f"--{name.replace('_', '-')} must be > 0, got {number}")
    return arguments


def _given(kind: type[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: getattr(arguments, name) for name in names}


def load(name: str, seed: int) -> list[TracedRequest]:
    """Make a synthetic trace, or read a file's."""
    if name in SYNTHETIC:
        return SYNTHETIC[name](seed)
    return read_trace(Path(name))


def simulate(
    trace: Sequence[TracedRequest],
    time: StepTime,
    limits: Limits,
    how: str,
    victims: str = "gained",
) -> dict[str, Any]:
    """Run a trace with one way of preemption; return its figures."""
    kinds = {
        "gained": (Preemption, Scheduler),
        "lacking": (PreemptionByLacking, ByLacking),
    }
    preemption, scheduler = kinds[victims]
    simulation = make_simulation(trace, time, limits, preemption, scheduler, how=how)
    simulation.run()
    return simulation.result()


def compare(
    trace: Sequence[TracedRequest], time: StepTime, limits: Limits
) -> dict[str, Any]:
    """Run a trace in every way and with the oracle; return how they compare."""
    lost, seconds = {}, {}
    line: dict[str, Any] = {}
    for way, always in (*WAYS.items(), ("oracle", None)):
        simulation = make_simulation(
            trace, time, limits, Decided, how="auto", always=always
        )
        if always is not None:
            simulation.run()
        else:
            regret = run_with_oracle(simulation, follow=way == "oracle")
            if way == "auto":
                line |= {
                    "preemptions": simulation.scheduler.num_preemptions,
                    "swaps": simulation.num_swapped,
                    "steps_with_preemption": regret.steps,
                    "steps_decided_wrongly": regret.differing,
                    "regret_percent": _more(regret.estimated, regret.cheapest),
                }
        lost[way] = sum(simulation.lost.values())
        seconds[way] = simulation.clock
    line["oracle_lost_seconds"] = round(lost["oracle"], 4)
    line["oracle_seconds"] = round(seconds["oracle"], 3)
    line["lost_percent"] = {way: _more(lost[way], lost["oracle"]) for way in WAYS}
    line["seconds_percent"] = {
        way: _more(seconds[way], seconds["oracle"]) for way in WAYS
    }
    return line


def _more(value: float, base: float) -> float:
    """Return by how many percent it is more than the base."""
    return round(100 * (value / base - 1), 2) if base else 0.0


def make_simulation(
    trace: Sequence[TracedRequest],
    time: StepTime,
    limits: Limits,
    kind: type[Preemption],
    scheduler: type[Scheduler] = Scheduler,
    **options: Any,
) -> Simulation:
    """Begin a run with a scheduler that estimates by what the model of time says.

    Args:
        trace: In the order of arrival.
        time: The model.
        limits: The scheduler's.
        kind: Of preemption.
        scheduler: Its kind.
        options: More for `kind`.
    """
    preemption = kind(
        bytes_per_block=time.kv_bytes * limits.block_size,
        swap_bandwidth=time.bandwidth,
        prefill_rate=time.prefill_rate(limits.max_num_batched_tokens),
        **options,
    )
    longest = max(len(request.prompt) + len(request.output) for request in trace)
    num_swap_blocks = len(trace) * -(-longest // limits.block_size)
    return Simulation(
        trace,
        time,
        scheduler(
            num_swap_blocks=num_swap_blocks,
            preemption=preemption,
            **dataclasses.asdict(limits),
        ),
    )


def _table_row(line: dict[str, Any]) -> str:
    """Return a line of a Markdown table: the case, and its figures."""
    left_out = {"benchmark", "seed", "time", *dataclasses.asdict(Limits())}
    cells = [f"{line['time']['bandwidth'] / 1e9:g} GB/s"]
    for name, value in line.items():
        if name not in left_out:
            values = value.values() if isinstance(value, dict) else [value]
            cells.append(" / ".join(map(str, values)))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
