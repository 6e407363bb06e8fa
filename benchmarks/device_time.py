"""Times of what runs on the device: from a profile, never from the host's clock."""

# pyright: reportPrivateImportUsage=false

import collections
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MAX_LAUNCHES = 32
_MIN_LAUNCHES = 3
_LAUNCHING_SECONDS = 3.0  # what is too slow for all launches in this time gets fewer
_MOSAIC = "mosaic_gpu"  # in the name of every kernel that Mosaic GPU compiles
_COPIED_BYTES = 2**30


class Event(NamedTuple):
    """A kernel or a copy that ran on the device."""

    name: str
    seconds: float


class DeviceTime(NamedTuple):
    """What launches of one function took.

    Attributes:
        seconds: Of everything that a launch runs on the device: the median.
        mosaic_seconds: Of its Mosaic GPU kernels alone; None: it has none.
        num_launches: How many were counted.
        num_kernels: Of one launch.
    """

    seconds: float
    mosaic_seconds: float | None
    num_launches: int
    num_kernels: int


def summarize(
    events: Sequence[Event], num_launches: int, *, num_discarded: int = 0
) -> DeviceTime:
    """Return the medians over launches.

    Args:
        events: Of all launches, in the order in which they ran.
        num_launches: Each ran the same kernels.
        num_discarded: So many launches, the first ones, do not count.

    Raises:
        ValueError: The events cannot be those of so many like launches.
    """
    size, rest = divmod(len(events), num_launches)
    if rest or not size:
        raise ValueError(f"{len(events)} events of {num_launches} like launches")
    launches = [events[start : start + size] for start in range(0, len(events), size)]
    names = [collections.Counter(event.name for event in each) for each in launches]
    if any(each != names[0] for each in names):
        raise ValueError(f"{num_launches} launches did not run the same kernels")
    counted = launches[num_discarded:]
    mosaic = [[e.seconds for e in each if _MOSAIC in e.name] for each in counted]
    return DeviceTime(
        seconds=statistics.median(sum(e.seconds for e in each) for each in counted),
        mosaic_seconds=statistics.median(map(sum, mosaic)) if mosaic[0] else None,
        num_launches=len(counted),
        num_kernels=size,
    )


def device_events(profile: Any) -> list[Event]:
    """Return what ran on the GPU, in order, from a `jax.profiler.ProfileData`.

    A GPU's plane has one line for each stream; what lines of other names hold is
    overhead of the profiler, or the same again by another grouping.
    """
    events = [
        event
        for plane in profile.planes
        if plane.name.startswith("/device:GPU:")
        for line in plane.lines
        if (line.name or "").startswith("Stream #")
        for event in line.events
    ]
    events.sort(key=lambda event: event.start_ns)
    return [Event(event.name, 1e-9 * event.duration_ns) for event in events]


def _by_profile(launch: Callable[[], Any]) -> list[Event]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            launch()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return device_events(jax.profiler.ProfileData.from_file(str(path)))


def _by_cupti(launch: Callable[[], Any]) -> list[Event]:
    # What `jax.experimental.mosaic.gpu.profiler.measure` does, which however launches
    # once before with the same arguments: L2 would then hold those of a small case.
    from jax._src.lib import mosaic_gpu

    mosaic_gpu._mosaic_gpu_ext._cupti_init()
    try:
        launch()
    finally:
        timings = mosaic_gpu._mosaic_gpu_ext._cupti_get_timings(True)
    return [Event(name, 1e-3 * milliseconds) for name, milliseconds in timings or []]


TIMERS = {"profile": _by_profile, "cupti": _by_cupti}
"""Ways to time, by name: each runs a function and returns the device's events.

`cupti` sees kernels only, `profile` copies and memsets too.
"""


def time_launches(
    timer: str, function: Callable, arguments: Iterator[tuple]
) -> DeviceTime:
    """Return what launches of a compiled function take on the device.

    Args:
        timer: One of `TIMERS`.
        function: Compiled already.
        arguments: Those of each launch.
    """
    start = time.perf_counter()  # only to choose how many launches
    jax.block_until_ready(function(*next(arguments)))
    fitting = int(_LAUNCHING_SECONDS / (time.perf_counter() - start))
    num_launches = 1 + min(MAX_LAUNCHES, max(_MIN_LAUNCHES, fitting))

    def launch():
        result = None
        for _ in range(num_launches):
            result = function(*next(arguments))
        jax.block_until_ready(result)

    # The first one finds a device that idled.
    return summarize(TIMERS[timer](launch), num_launches, num_discarded=1)


class Copy(NamedTuple):
    """What the card copies.

    Attributes:
        timer: The first of `TIMERS` that works here.
        bytes_per_s: Read and written.
        host_bytes_per_s: The same by the host's clock, over many copies in flight; a
            timer that is right gives about as much.
    """

    timer: str
    bytes_per_s: float
    host_bytes_per_s: float


def measure_copy() -> Copy:
    """Copy a large array, adding 1 to it, with the first timer that works.

    Raises:
        RuntimeError: No timer works; the message says why each does not.
    """
    x = jax.random.normal(jax.random.key(0), (_COPIED_BYTES // 2,), jnp.float32)
    x = x.astype(jnp.bfloat16)
    add_one = jax.jit(lambda x: x + jnp.ones((), x.dtype))
    moved = 2 * x.nbytes

    def endless() -> Iterator[tuple]:
        while True:
            yield (x,)

    jax.block_until_ready(add_one(x))
    start = time.perf_counter()
    jax.block_until_ready([add_one(x) for _ in range(8)])
    host_seconds = (time.perf_counter() - start) / 8
    problems = []
    for timer in TIMERS:
        try:
            taken = time_launches(timer, add_one, endless())
        except Exception as error:  # whatever is missing, the next may do without it
            problems.append(f"{timer}: {error}")
        else:
            return Copy(timer, moved / taken.seconds, moved / host_seconds)
    raise RuntimeError("; ".join(problems))
