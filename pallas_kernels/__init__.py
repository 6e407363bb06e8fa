"""Attention kernels: arrays in, arrays out. Imports nothing of jaxkv."""
