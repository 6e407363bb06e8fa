"""Attention and products on CPUs, in C++: arrays in, arrays out.

Imports nothing of jaxkv. XLA calls the kernels through its foreign function interface.
"""

from cpu_kernels.entry import multiply, paged_attention
from cpu_kernels.library import INSTRUCTION_SETS, supported_instruction_sets

__all__ = [
    "INSTRUCTION_SETS",
    "multiply",
    "paged_attention",
    "supported_instruction_sets",
]
