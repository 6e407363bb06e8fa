"""Kernels with a fault planted in their source."""

import sys
import types
from pathlib import Path

from pallas_kernels import mosaic, operands

# The last thing that a consumer does with a slot.
FREE = "plgpu.barrier_arrive(ring.free.at[stage])"


def planted_kernel(monkeypatch, kernel, edited, *edits):
    """Return a kernel's module as it is with a source edited.

    Args:
        monkeypatch: pytest's.
        kernel: The module `decode` or `prefill`.
        edited: That, or a module that it imports.
        *edits: (old, new) of text that occurs once. A slot that `new` gives back is not
            given back a second time.
    """
    for module in (mosaic, operands, kernel):
        source = Path(module.__file__).read_text()
        for old, new in edits if module is edited else ():
            assert source.count(old) == 1, f"not once in the source: {old!r}"
            if FREE in new:  # moved, not doubled
                source = source.replace(FREE, "pass")
            source = source.replace(old, new)
        changed = types.ModuleType(module.__name__)
        exec(compile(source, "edited", "exec"), changed.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, changed)
    return changed
