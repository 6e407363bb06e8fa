"""What tests of the CPU kernels share: numbers, and how the kernels are built."""

import ast
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def random_integers(seed, *shape):
    """Products of such are exact in float32, whatever the order of the sum."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def build_constant(name):
    """A constant of `hatch_build.py`, which only a build can import."""
    tree = ast.parse((ROOT / "hatch_build.py").read_text())
    (value,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return value
