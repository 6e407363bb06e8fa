"""A peer's process: whether the peer is installed, one run of it, and its memory."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.2
"""Between two looks at a process's memory."""

_SHOWN_CHARACTERS = 1500
_GRACE_SECONDS = 10


class Failure(Exception):
    """A process failed; the message ends with what it wrote last."""


class Python(NamedTuple):
    """The Python of an environment.

    Attributes:
        executable: It.
        variables: What its processes find in their environment besides ours; None
            takes a variable away.
    """

    executable: Path
    variables: Mapping[str, str | None]

    def missing(self, package: str) -> str | None:
        """Say why a package cannot be used, if so, without importing it."""
        if not os.access(self.executable, os.X_OK):
            return f"not installed: there is no {self.executable}"
        code = (
            "import importlib.util, sys; sys.exit(not importlib.util.find_spec({!r}))"
        )
        command = [str(self.executable), "-c", code.format(package)]
        found = subprocess.run(command, capture_output=True, check=False)
        if found.returncode:
            return f"not installed: {self.executable} has no {package}"
        return None

    def run(self, arguments: Sequence[str | Path], log: Path, timeout: float) -> float:
        """Run a script to its end.

        Its process leads a group of its own. However this function ends, an interrupt
        included, nothing of that group is left running.

        Args:
            arguments: The script and its arguments.
            log: Where to write what it prints.
            timeout: Seconds it may take.

        Returns:
            The most memory that it and its children held at once, in bytes: resident,
            what they share counted for each.

        Raises:
            Failure: It took too long, or did not exit with 0.
        """
        variables = {
            name: value
            for name, value in (os.environ | dict(self.variables)).items()
            if value is not None
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self.executable), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=variables,
            )
            try:
                peak = _wait(process, timeout)
            finally:
                _end_group(process)
        if peak is None:
            raise Failure(f"took more than {timeout:g} s; it ended with\n{_end(log)}")
        if process.returncode:
            raise Failure(
                f"exit status {process.returncode}; it ended with\n{_end(log)}"
            )
        return peak


def _wait(process: subprocess.Popen[bytes], timeout: float) -> float | None:
    """Wait for a process; return its peak memory, or None if the time is up."""
    deadline = time.monotonic() + timeout
    peak = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            return None
        memory = [_memory(pid) for pid in _tree(process.pid)]
        # Between two looks, a single process's own record of its peak counts.
        peak = max(peak, sum(now for now, _ in memory), *(most for _, most in memory))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_SECONDS)
    return peak


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all that it started, those that are alive."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's resident bytes, now and at most; zeros if it is gone."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = value
    return _kib(fields.get("VmRSS")), _kib(fields.get("VmHWM"))


def _kib(value: str | None) -> int:
    return 0 if value is None else 1024 * int(value.split()[0])


def _end(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-_SHOWN_CHARACTERS:]
