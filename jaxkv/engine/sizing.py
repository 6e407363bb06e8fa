"""How many blocks fit, on the device and in the swap space."""

import os

import jax

from jaxkv.config import CacheConfig, EngineConfig


def choose_num_blocks(
    cache_config: CacheConfig, config: EngineConfig, max_model_len: int
) -> int:
    """Return the number of blocks, the null block included, that memory allows.

    On a GPU: what `memory_fraction` of its memory leaves beside what is in use now,
    the parameters among it. On a CPU: the smaller of max_num_seqs requests of
    max_model_len tokens and a quarter of the free memory.

    Raises:
        ValueError: Not even one block fits.
    """
    device = jax.local_devices()[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    if memory and "bytes_limit" in memory:
        available = int(memory["bytes_limit"] * config.memory_fraction)
        available -= memory["bytes_in_use"]
    else:
        available = _free_host_bytes() // 4
    most_useful = config.max_num_seqs * -(-max_model_len // cache_config.block_size)
    fitting = available // cache_config.bytes_per_block
    if fitting < 2:
        raise ValueError(
            f"no room for a KV cache: {max(available, 0)} bytes are available and a "
            f"block of {cache_config.block_size} tokens takes "
            f"{cache_config.bytes_per_block}"
        )
    return min(most_useful + 1, fitting)


def check_fits(cache_config: CacheConfig) -> None:
    """Check that a cache can be allocated at all.

    Raises:
        ValueError: It is larger than the memory that is free; both are named.
    """
    device = jax.local_devices()[0]
    memory = device.memory_stats() if device.platform != "cpu" else None
    if memory and "bytes_limit" in memory:
        available = memory["bytes_limit"] - memory["bytes_in_use"]
    else:
        available = _free_host_bytes()
    if cache_config.total_bytes > available:
        raise ValueError(
            f"num_blocks {cache_config.num_blocks} of {cache_config.block_size} tokens "
            f"take {cache_config.total_bytes} bytes, but {available} are available"
        )


def num_swap_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """Return how many blocks `swap_space` holds.

    Raises:
        ValueError: Not even one, or more than there is memory for.
    """
    swap_bytes = int(config.swap_space * 2**30)
    if config.swap_space == 0:
        return 0
    if swap_bytes < bytes_per_block:
        raise ValueError(
            f"swap_space {config.swap_space} GiB is {swap_bytes} bytes, but a block "
            f"takes {bytes_per_block}"
        )
    available = _free_host_bytes()
    if swap_bytes > available:
        raise ValueError(
            f"swap_space {config.swap_space} GiB is {swap_bytes} bytes, but "
            f"{available} are available"
        )
    return swap_bytes // bytes_per_block


def _free_host_bytes() -> int:
    """Return the memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
