"""Asks Linux to keep large arrays of the CPU in huge pages.

Weights and the cache are read from end to end in every step. In pages of 4 KiB a good
part of that time goes into finding the pages, and reading ahead stops where each ends.
"""

import ctypes
import errno
import sys
import threading
from collections.abc import Iterable, Sequence

import jax

_UNIT = 2 << 20  # bytes of a huge page
_SMALLEST_ARRAY = 256 << 10  # bytes of an array that is worth it
_MADV_COLLAPSE = 25  # Linux 6.1: now, whatever the system's setting says
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def start_collapsing(arrays: Iterable[jax.Array]) -> threading.Thread:
    """Begin to move arrays into huge pages where the system can; return at once.

    Their content stays, and they may be read, written, donated and deleted meanwhile:
    it takes seconds for each GB, most of it outside of Python. Small arrays, those of
    other devices, and systems that cannot are left alone.

    Returns:
        The thread that does it; the process does not wait for it at its end.
    """
    # The arrays are not kept: memory that is given back meanwhile is skipped, and what
    # takes its place is none the worse in huge pages.
    thread = threading.Thread(
        target=_collapse, args=(_memory_of(arrays),), name="huge pages", daemon=True
    )
    thread.start()
    return thread


def _memory_of(arrays: Iterable[jax.Array]) -> list[tuple[int, int]]:
    """Return (address, bytes) of what is large enough, on CPUs, by address."""
    return sorted(
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in arrays
        for shard in array.addressable_shards
        if shard.device.platform == "cpu" and shard.data.nbytes >= _SMALLEST_ARRAY
    )


def _collapse(ranges: Sequence[tuple[int, int]]) -> int:
    """Move memory into huge pages; return the bytes asked for successfully."""
    libc = _libc
    if libc is None:
        return 0
    total, done_until = 0, 0
    for address, size in ranges:
        begin = max(address // _UNIT * _UNIT, done_until)
        end = -(-(address + size) // _UNIT) * _UNIT
        # The first and the last page have neighbours, which need not be mapped.
        for first in range(begin, end, _UNIT):
            result = libc.madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(_UNIT), _MADV_COLLAPSE
            )
            if result == 0:
                total += _UNIT
            elif ctypes.get_errno() == errno.ENOSYS:
                return total
            elif ctypes.get_errno() == errno.EINVAL:  # not this system, or mapping
                break
        done_until = max(done_until, end)
    return total
