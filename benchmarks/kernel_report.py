"""What a run of the kernel benchmark leaves: a table, a plot and the records."""

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kernel_peers, report_files

PEERS = tuple(
    name for name in kernel_peers.IMPLEMENTATIONS if name != kernel_peers.OURS
)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a table in Markdown; peers as multiples of our time."""
    lines = []
    if records:
        last = records[-1]
        copied = last["copy_bytes_per_s"]
        by_copy = "" if copied is None else f", copy {copied / 1e12:.2f} TB/s"
        day = last["date"][:10]
        lines = [f"{last['device']}, jax {last['jax']}, {day}{by_copy}", ""]
    header = ["case", "MB", "ideal us", "us", "kernel us", "of copy", "of peak"]
    lines.append(f"| {' | '.join([*header, *PEERS])} |")
    lines.append(f"|---|{'---:|' * (len(header) + len(PEERS) - 1)}")
    for record in records:
        us = record["us"]
        columns = [
            record["case"],
            f"{record['bytes'] / 1e6:.0f}",
            f"{record['predicted_h200_us']:.1f}",
            _shown(us, ".1f") if record["problem"] is None else record["problem"],
            _shown(record["kernel_us"], ".1f"),
            _shown(record["share_of_copy"], ".0%"),
            _shown(record["share_of_peak"], ".0%"),
        ]
        for peer in PEERS:
            theirs = record["peers"][peer]["us"]
            ratio = None if us is None or theirs is None else theirs / us
            columns.append(_shown(ratio, ".2f", "x"))
        lines.append(f"| {' | '.join(c.replace('|', ' ') for c in columns)} |")
    return "\n".join(lines)


def _shown(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write kernels.jsonl, kernels.md and kernels.png; see `report_files.write`."""
    plot = functools.partial(_plot, records)
    return report_files.write(folder, "kernels", records, table(records), plot)


def _plot(records: Sequence[Mapping[str, Any]], path: Path) -> str | None:
    """Plot the share of the copy's bandwidth over length, a line for each batch.

    Returns:
        Why there is no plot, if so.
    """
    timed = [r for r in records if r["decode"] and r["share_of_copy"] is not None]
    if not timed:
        return "no decode case has a time"
    figures = importlib.import_module("matplotlib.figure")
    all_kv_heads = sorted({record["kv_heads"] for record in timed})
    figure = figures.Figure(figsize=(6 * len(all_kv_heads), 4.5), layout="constrained")
    all_axes = figure.subplots(1, len(all_kv_heads), sharey=True, squeeze=False)[0]
    for axes, kv_heads in zip(all_axes, all_kv_heads, strict=True):
        shown = [record for record in timed if record["kv_heads"] == kv_heads]
        for batch in sorted({record["rows"] for record in shown}):
            points = sorted(
                (record["longest"], record["share_of_copy"])
                for record in shown
                if record["rows"] == batch
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=str(batch))
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("keys of a row")
        axes.set_title(f"decode, {kv_heads} KV heads, {timed[0]['device']}")
        axes.legend(title="rows", ncols=2)
    all_axes[0].set_ylabel("share of the measured copy bandwidth")
    figure.savefig(path, dpi=150)
    return None
