"""What a benchmark leaves in a folder: its records, a table and a plot."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write(
    folder: Path,
    name: str,
    records: Sequence[Mapping[str, Any]],
    table: str,
    plot: Callable[[Path], str | None],
) -> list[str]:
    """Write NAME.jsonl, NAME.md and NAME.png into a folder, each whole.

    What an earlier run wrote is replaced.

    Args:
        folder: Made if it is not there.
        name: The files'.
        records: One line each.
        table: In Markdown.
        plot: Writes a picture with matplotlib, or says why there is none.

    Returns:
        Lines that say what is not there and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        new = Path(temporary)
        lines = "".join(f"{json.dumps(record)}\n" for record in records)
        (new / f"{name}.jsonl").write_text(lines)
        (new / f"{name}.md").write_text(f"{table}\n")
        try:
            missing = plot(new / f"{name}.png")
        except ImportError:
            missing = (
                "matplotlib is not installed; it is in the dependency group `bench`"
            )
        (folder / f"{name}.png").unlink(missing_ok=True)
        for path in sorted(new.iterdir()):
            os.replace(path, folder / path.name)
    return [] if missing is None else [f"No plot: {missing}."]
