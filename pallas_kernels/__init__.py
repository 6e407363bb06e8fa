"""Attention kernels: arrays in, arrays out. Imports nothing of jaxkv."""

from pallas_kernels.entry import check_options, paged_attention
from pallas_kernels.merge import merge_partials
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.target import target_device

__all__ = [
    "check_options",
    "merge_partials",
    "paged_attention",
    "paged_attention_reference",
    "target_device",
]
