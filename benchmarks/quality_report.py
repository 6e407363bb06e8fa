"""What a run of the quality benchmark leaves: a table, a plot and the records."""

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report_files
from benchmarks.quality_setting import REFERENCE

_HEADER = (
    "K:V",
    "bytes a token",
    "perplexity",
    "change, %",
    "mean KL",
    "99.9 % of KL",
    "same top, %",
    "equal tokens, mean",
    "median",
)
_EXACT = 1e-9  # what a KL of 0 is drawn as


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a table in Markdown, with a line of what was run."""
    lines = []
    if records:
        one = records[0]
        lines = [
            f"{one['model']}, {one['text']}: {one['windows']} windows of "
            f"{one['window']} tokens, {one['scored']} scored; {one['prompts']} prompts "
            f"of {one['prompt_tokens']} tokens, {one['max_tokens']} generated; "
            f"{one['device']}, jax {one['jax']}, {one['date'][:10]}",
            "",
        ]
    lines.append(f"| {' | '.join(_HEADER)} |")
    lines.append(f"|---|{'---:|' * (len(_HEADER) - 1)}")
    for record in records:
        change = record["perplexity_change_percent"]
        error = record["perplexity_change_error"]
        columns = [
            record["setting"],
            str(record["bytes_per_token"]),
            f"{record['perplexity']:.4f}",
            f"{change:+.3f} ± {error:.3f}",
            f"{record['mean_kl']:.2e}",
            f"{record['kl_p999']:.2e}",
            f"{record['same_top_percent']:.2f}",
            _shown(record["agreeing_mean"]),
            _shown(record["agreeing_median"]),
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Write quality.jsonl, quality.md and quality.png; see `report_files.write`."""
    plot = functools.partial(_plot, records)
    return report_files.write(folder, "quality", records, table(records), plot)


def _plot(records: Sequence[Mapping[str, Any]], path: Path) -> str | None:
    """Plot the mean KL over bytes where K and V are alike, and of each apart.

    Returns:
        Why there is no plot, if so.
    """
    inexact = [record for record in records if record["setting"] != REFERENCE]
    if not inexact:
        return "only the reference was run"
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _plot_over_bytes(left, inexact)
    _plot_apart(right, inexact)
    figure.savefig(path, dpi=90)
    return None


def _plot_over_bytes(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    sides = (("left", 5), ("right", -5))
    shown = [record for record in records if REFERENCE not in record["formats"]]
    shown.sort(key=lambda record: record["mean_kl"])
    for number, record in enumerate(shown):
        k, v = record["formats"]
        point = (record["bytes_per_token"], max(record["mean_kl"], _EXACT))
        axes.plot(*point, marker="o", linestyle="", color="C0" if k == v else "C1")
        # Names of neighbours lie on different sides.
        side, offset = sides[number % 2]
        where = {"textcoords": "offset points", "ha": side, "va": "center"}
        axes.annotate(record["setting"], point, (offset, 0), fontsize=7, **where)
    axes.set_yscale("log")
    axes.margins(x=0.45)
    axes.set_xlabel("bytes of K and V for a token, scales included")
    axes.set_ylabel("mean KL to float32, nats")
    axes.grid(alpha=0.3)


def _plot_apart(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Bars of K alone, V alone and both, for the formats that were run so."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        k, v = record["formats"]
        name = {v: "K and V", REFERENCE: "K"}
        group = "V" if k == REFERENCE else name.get(k if k == v else v)
        if group is not None:
            options = record["setting"].removeprefix(record["kv_cache_dtype"])
            low = v if k == REFERENCE else k
            kl = max(record["mean_kl"], _EXACT)
            found.setdefault(f"{low}{options}", {})[group] = kl
    apart = {name: bars for name, bars in found.items() if len(bars) > 1}
    for offset, group in enumerate(("K", "V", "K and V")):
        places = [p for p, bars in enumerate(apart.values()) if group in bars]
        heights = [bars[group] for bars in apart.values() if group in bars]
        axes.bar([p + 0.27 * (offset - 1) for p in places], heights, 0.25, label=group)
    axes.set_xticks(range(len(apart)), list(apart), rotation=20, ha="right", fontsize=8)
    axes.legend(title="stored so")
    axes.grid(axis="y", alpha=0.3)
