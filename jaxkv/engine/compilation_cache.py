"""Where compiled steps are kept from one process to the next."""

import hashlib
import os
import platform
from pathlib import Path

import jax
import platformdirs

_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_MAX_BYTES = 4 * 2**30  # of all compiled steps; the least recently used go first


def use_compilation_cache() -> Path | None:
    """Let JAX keep what it compiles in the user's cache folder.

    A choice of the user's stays: a folder named by `JAX_COMPILATION_CACHE_DIR` or in
    `jax.config`, no cache at all with `JAX_ENABLE_COMPILATION_CACHE=false`, a largest
    size, and what must take how long to be kept.

    `LLM` and the command line call this, before anything is compiled; importing jaxkv
    changes nothing of JAX.

    Returns:
        The folder in use; None: nothing is kept.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        caches = platformdirs.user_cache_dir("jaxkv")
        folder = str(Path(caches, "compiled", _machine()))
        jax.config.update("jax_compilation_cache_dir", folder)
        if jax.config.jax_compilation_cache_max_size == -1:
            jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    is_default = jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    if is_default and _LEAST_SECONDS.upper() not in os.environ:
        # Small ones too: what moves blocks takes a tenth of a second each.
        jax.config.update(_LEAST_SECONDS, 0.0)
    return Path(folder)


def _machine() -> str:
    """Name what code for this CPU depends on; a home folder may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    name = f"{platform.machine()} {platform.processor()} {features}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]
