"""The compiled kernels: which this machine can run, and their names in XLA.

`hatch_build.py` compiles `src/library.cc` into `lib/`, once for each instruction set,
when the project is installed. A library is loaded when it is first asked for.
"""

import ctypes
import functools
import os
from pathlib import Path

import jax

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

INSTRUCTION_SETS = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
}
"""From the fastest on: what Linux calls the features that each needs."""

_FOLDER = Path(__file__).parent / "lib"
_HANDLERS = ("jaxkv_multiply", "jaxkv_normalize", "jaxkv_gate", "jaxkv_attend")


def supported_instruction_sets() -> tuple[str, ...]:
    """Name the instruction sets that this machine has and that were compiled for."""
    features = _cpu_features()
    return tuple(
        name
        for name, needed in INSTRUCTION_SETS.items()
        if features.issuperset(needed) and (_FOLDER / f"{name}.so").exists()
    )


@functools.cache
def load(instruction_set: str | None = None) -> str:
    """Register the kernels of an instruction set with XLA; None: of the fastest.

    The environment variable JAXKV_INSTRUCTION_SET names another than the fastest.

    Returns:
        The instruction set, with which the names of its kernels in XLA end.

    Raises:
        NotImplementedError: This machine cannot run them, they were not compiled, or
            they do not load.
        ValueError: JAXKV_INSTRUCTION_SET names one that is not there.
    """
    supported = supported_instruction_sets()
    if instruction_set is None:
        if not supported:
            raise NotImplementedError(
                "a CPU without AVX2"
                if any(_FOLDER.glob("*.so"))
                else "kernels that were not compiled when jaxkv was installed"
            )
        chosen = os.environ.get("JAXKV_INSTRUCTION_SET") or supported[0]
        if chosen not in supported:
            raise ValueError(
                f"JAXKV_INSTRUCTION_SET is {chosen!r}; this machine has {supported}"
            )
        return load(chosen)
    if instruction_set not in supported:
        raise NotImplementedError(f"{instruction_set}; there are {supported}")
    try:
        library = ctypes.CDLL(str(_FOLDER / f"{instruction_set}.so"))
        capsules = {
            name: jax.ffi.pycapsule(getattr(library, name)) for name in _HANDLERS
        }
    except (OSError, AttributeError) as error:
        raise NotImplementedError(
            f"kernels that do not load; install jaxkv again: {error}"
        ) from error
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(
            f"{name}_{instruction_set}", capsule, platform="cpu"
        )
    return instruction_set


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
