"""Attention, products, norms and gates on CPUs, in C++: arrays in, arrays out.

Imports nothing of jaxkv. XLA calls the kernels through its foreign function interface.
"""

from cpu_kernels.entry import (
    is_available,
    multiply,
    multiply_reference,
    paged_attention,
    rms_norm,
    rms_norm_reference,
    swiglu,
    swiglu_reference,
)
from cpu_kernels.library import INSTRUCTION_SETS, supported_instruction_sets

__all__ = [
    "INSTRUCTION_SETS",
    "is_available",
    "multiply",
    "multiply_reference",
    "paged_attention",
    "rms_norm",
    "rms_norm_reference",
    "supported_instruction_sets",
    "swiglu",
    "swiglu_reference",
]
