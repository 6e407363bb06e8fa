"""Attention kernels: arrays in, arrays out. Imports nothing of jaxkv."""

from pallas_kernels.merge import merge_partials
from pallas_kernels.paged_attention import paged_attention_mosaic_gpu
from pallas_kernels.reference import paged_attention_reference

__all__ = [
    "merge_partials",
    "paged_attention_mosaic_gpu",
    "paged_attention_reference",
]
