"""Benchmarks: each checks correctness first, then prints one JSON line a case."""
