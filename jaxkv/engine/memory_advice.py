"""Asks Linux to keep large arrays of the CPU in huge pages.

Weights and the cache are read from end to end in every step. In pages of 4 KiB a good
part of that time goes into finding the pages, and reading ahead stops where each ends.
"""

import ctypes
import errno
import sys
from collections.abc import Iterable

import jax

_UNIT = 2 << 20  # bytes of a huge page
_SMALLEST_ARRAY = 256 << 10  # bytes of an array that is worth it
_MADV_COLLAPSE = 25  # Linux 6.1: now, whatever the system's setting says
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def collapse_memory(arrays: Iterable[jax.Array]) -> int:
    """Move arrays into huge pages where the system can; their content stays.

    Small arrays, those of other devices, and systems that cannot are left alone.

    Returns:
        Bytes asked for successfully.
    """
    if _libc is None:
        return 0
    ranges = sorted(
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in arrays
        for shard in array.addressable_shards
        if shard.device.platform == "cpu" and shard.data.nbytes >= _SMALLEST_ARRAY
    )
    total, done_until = 0, 0
    for address, size in ranges:
        begin = max(address // _UNIT * _UNIT, done_until)
        end = -(-(address + size) // _UNIT) * _UNIT
        # The first and the last page have neighbours, which need not be mapped.
        for first in range(begin, end, _UNIT):
            result = _libc.madvise(
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
