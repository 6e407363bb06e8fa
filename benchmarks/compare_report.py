"""What a comparison of engines leaves: a table, a plot and the records."""

import functools
import importlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report_files

Record = Mapping[str, Any]


class Report(NamedTuple):
    """A comparison.

    Attributes:
        records: One a run.
        skipped: Engines that are not installed, and why.
        failed: Engines that failed, and how.
        machine: The processor's name.
        commit: Of this repository, if known.
        command: What was typed.
        ours: The engine against which the others are held.
    """

    records: Sequence[Record]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]
    machine: str
    commit: str | None
    command: str
    ours: str


def table(report: Report) -> str:
    """Return the comparison as a table in Markdown, fastest first: medians of turns."""
    lines = [*_heading(report), ""]
    header = [
        "engine",
        "output tokens/s",
        "total tokens/s",
        "TTFT median, ms",
        "TTFT p99, ms",
        "peak MiB",
        f"{report.ours} is",
        f"same tokens as {report.ours}",
        "as transformers float32",
    ]
    lines.append(f"| {' | '.join(header)} |")
    lines.append(f"|---|{'---:|' * (len(header) - 1)}")
    for engine, records in _by_engine(report.records).items():
        ratio = ratio_to_ours(report, engine)
        columns = [
            engine,
            f"{_median(records, 'output_tokens_per_s'):.1f}",
            f"{_median(records, 'total_tokens_per_s'):.1f}",
            f"{_median(records, 'ttft_ms_median'):.0f}",
            f"{_median(records, 'ttft_ms_p99'):.0f}",
            f"{max(record['peak_rss_mib'] for record in records)}",
            "-" if ratio is None else f"{ratio:.2f}x",
            _counted(records, "same_as_ours"),
            _counted(records, "same_as_reference"),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    lines.append("")
    for engine, records in _by_engine(report.records).items():
        last = records[-1]
        chosen = {**last["versions"], **last["settings"]}
        said = ", ".join(f"{name} {value}" for name, value in chosen.items())
        rates = ", ".join(f"{record['output_tokens_per_s']:.1f}" for record in records)
        lines.append(f"- {engine}: {said}. Output tokens/s by turn: {rates}.")
    lines += [f"- {engine}: {why}." for engine, why in report.skipped.items()]
    for engine, why in report.failed.items():
        first, *rest = why.splitlines()
        lines += [f"- {engine} failed: {first}", *(f"      {line}" for line in rest)]
    return "\n".join(lines)


def _heading(report: Report) -> list[str]:
    lines = [f"`{report.command}`"]
    if report.records:
        last = report.records[-1]
        caching = "on" if last["prefix_caching"] else "off"
        arrival = "one at a time" if last["one_at_a_time"] else "all at once"
        at = "" if report.commit is None else f", commit {report.commit}"
        lines += [
            "",
            f"{last['model']} in {last['dtype']}, {last['trace']}: "
            f"{last['requests']} requests {arrival}, {last['prompt_tokens']} prompt "
            f"tokens, {last['output_tokens']} output tokens, prefix caching {caching}. "
            f"{last['threads']} threads of {report.machine}, {last['date'][:10]}{at}.",
        ]
    return lines


def _by_engine(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return each engine's records in the order of turns, the fastest engine first."""
    engines: dict[str, list[Record]] = {}
    for record in records:
        engines.setdefault(record["engine"], []).append(record)
    return dict(
        sorted(
            engines.items(),
            key=lambda engine: -_median(engine[1], "output_tokens_per_s"),
        )
    )


def _median(records: Sequence[Record], name: str) -> float:
    return statistics.median(record[name] for record in records)


def ratio_to_ours(report: Report, engine: str) -> float | None:
    """Return how many times as fast ours is: the median of the turns' ratios.

    None: they have no turn in common.
    """
    rates = {
        (record["engine"], record["turn"]): record["output_tokens_per_s"]
        for record in report.records
    }
    ratios = [
        rates[report.ours, turn] / rate
        for (name, turn), rate in rates.items()
        if name == engine and (report.ours, turn) in rates
    ]
    return statistics.median(ratios) if ratios else None


def _counted(records: Sequence[Record], name: str) -> str:
    """Return in how many requests tokens agree: the least of all turns."""
    counts = [record[name] for record in records if record[name] is not None]
    return f"{min(counts)}/{records[0]['requests']}" if counts else "-"


def write(report: Report, folder: Path) -> list[str]:
    """Write compare.jsonl, compare.md and compare.png; see `report_files.write`."""
    plot = functools.partial(_plot, report)
    records = report.records
    return report_files.write(folder, "compare", records, table(report), plot)


def _plot(report: Report, path: Path) -> str | None:
    """Plot throughput and time to the first token, a bar for each engine.

    Returns:
        Why there is no plot, if so.
    """
    engines = _by_engine(report.records)
    if not engines:
        return "no engine ran"
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(
        figsize=(11, 1.5 + 0.45 * len(engines)), layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(engines)[::-1]
    for y, name in enumerate(names):
        records = engines[name]
        rates = [record["output_tokens_per_s"] for record in records]
        color = "tab:blue" if name == report.ours else "tab:gray"
        left.barh(y, statistics.median(rates), color=color)
        left.plot(rates, [y] * len(rates), "k|")
        middle, late = (
            _median(records, key) / 1e3 for key in ("ttft_ms_median", "ttft_ms_p99")
        )
        right.plot([middle, late], [y, y], "-", color=color, linewidth=3)
        right.plot([middle], [y], "o", color=color)
        right.plot([late], [y], "|", color=color, markersize=14)
    left.set_yticks(range(len(names)), names)
    left.set_xlabel("output tokens/s: median, and each turn")
    right.set_xlabel("time to first token, s: median (dot) to 99th percentile")
    right.set_xlim(left=0)
    last = report.records[-1]
    figure.suptitle(f"{last['model']} in {last['dtype']}, {last['trace']}")
    figure.savefig(path, dpi=150)
    return None
