"""Lists the kernels of a module compiled for a GPU, and what each of them moves.

An instruction of XLA's final program that is no plumbing is a kernel. It moves its
operands and its results, but no more than it touches: of an array that it gathers or
slices from what is taken, of one that it writes into in place what is put there.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.hlo import (
    IN_PLACE,
    PLUMBING,
    Computation,
    Instruction,
    behind_bitcasts,
    is_in_place,
    parse,
    results,
)

ATTENTION = "attention"
PRODUCT = "product"

_BITS = {"pred": 8, "bf16": 16}  # others end in theirs: f32, u8, f8e4m3fn
_TAKING = {"gather", "dynamic-slice", "slice"}
# What says best what a fusion does, in this order.
_TELLING = (
    ("rsqrt", "norm"),
    ("cosine", "RoPE's angles"),
    ("logistic", "SiLU and product"),
    ("scatter", "write in place"),
    ("dynamic-update-slice", "write in place"),
    ("exponential", "exponentials"),
    ("sort", "sort"),
    ("gather", "gather"),
    ("dynamic-slice", "gather"),
    ("pad", "RoPE, padding"),
    ("transpose", "transpose"),
    ("reduce", "reduce"),
    ("concatenate", "concatenate"),
    ("add", "add"),
    ("multiply", "multiply"),
    ("select", "select"),
    ("broadcast", "fill"),
)


class Kernel(NamedTuple):
    """One launch.

    Attributes:
        kind: `PRODUCT`, `ATTENTION`, or what it is called in the program.
        what: In a few words.
        read: Bytes.
        written: Bytes.
        operations: Multiplications and additions of products.
    """

    kind: str
    what: str
    read: int
    written: int
    operations: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def seconds(self, bandwidth: float, rate: float) -> float:
        """Return the larger of the times for its bytes and for its operations."""
        return max(self.moved / bandwidth, self.operations / rate)


def num_bytes(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of arrays, given as (dtype, shape)."""
    total = 0
    for dtype, shape in arrays:
        if dtype in ("token", "opaque"):
            continue
        number = re.match(r"[a-z]+(\d+)", dtype)
        bits = _BITS.get(dtype) or int(number[1] if number else 0)
        total += math.prod(shape) * bits // 8
    return total


def kernels(
    text: str, attention: Callable[[Instruction, list[Instruction]], Kernel]
) -> list[Kernel]:
    """List a module's kernels in the order in which they run.

    Of several branches the one of fewest kernels is listed, and of a loop its body
    once: a step's branches are for what most steps do not do, and so are its loops.

    Args:
        text: `Compiled.as_text()`.
        attention: Says what a call of a kernel of ours moves, from it and from what
            makes its operands.
    """
    computations = parse(text)
    entry = re.search(r"^ENTRY %([\w.\-]+)", text, re.MULTILINE)
    assert entry, "no entry computation"

    def run(computation: Computation) -> Iterator[Kernel]:
        for x in computation.values():
            if x.opcode == "conditional":
                branches = [list(run(computations[name])) for name in _branches(x)]
                yield from min(branches, key=len)
            elif x.opcode == "while":
                yield from run(computations[_named("body", x)[0]])
            elif x.opcode in ("call", "async-start"):
                called = _named("to_apply", x) + x.calls
                yield from run(computations[called[0]])
            elif x.opcode in PLUMBING | {"constant"} or x.opcode.endswith("-done"):
                continue
            elif "mosaic_gpu" in x.attributes and x.opcode == "custom-call":
                operands = [computation[name] for name in x.operands]
                yield attention(x, operands)
            else:
                yield _kernel(x, computation, computations)

    return list(run(computations[entry[1]]))


def _branches(x: Instruction) -> list[str]:
    both = _named("true_computation", x) + _named("false_computation", x)
    several = re.search(r"branch_computations=\{([^}]*)\}", x.attributes)
    return both or re.findall(r"%([\w.\-]+)", several[1] if several else "")


def _named(attribute: str, x: Instruction) -> list[str]:
    return re.findall(rf"\b{attribute}=%([\w.\-]+)", x.attributes)


def _kernel(
    x: Instruction, computation: Computation, computations: dict[str, Computation]
) -> Kernel:
    operands = [computation[name] for name in x.operands]
    if x.opcode != "fusion":
        operations = _operations(x, operands) if x.opcode == "dot" else 0
        read, written = (
            sum(num_bytes(y.arrays()) for y in operands),
            num_bytes(x.arrays()),
        )
        if is_in_place(x, computations):
            written = num_bytes(_update(x, computation).arrays())
            read += written - num_bytes(operands[0].arrays())
        return Kernel(x.opcode, x.result, read, written, operations)
    inside = computations[x.calls[0]]
    shares = _shares_read(inside)
    read = sum(
        round(shares[y.name] * num_bytes(y.arrays()))
        for y in inside.values()
        if y.opcode == "parameter"
    )
    written = 0
    for end in results(inside):
        in_place = end.opcode in IN_PLACE and (
            behind_bitcasts(end.operands[0], inside).opcode == "parameter"
        )
        made = _update(end, inside) if in_place else end
        written += num_bytes(made.arrays())
    operations = sum(
        _operations(y, [inside[name] for name in y.operands])
        for y in inside.values()
        if y.opcode == "dot"
    )
    opcodes = {y.opcode for y in inside.values()}
    if operations:
        return Kernel(
            PRODUCT, f"{_weights(inside)} -> {x.result}", read, written, operations
        )
    what = next((what for opcode, what in _TELLING if opcode in opcodes), "other")
    return Kernel("fusion", f"{what} -> {x.result}", read, written)


def _shares_read(inside: Computation) -> dict[str, float]:
    """Return which share of each of its arrays a fusion computes or reads, at most.

    Only what somebody asks for is computed: of what is sliced or gathered from as much
    as is taken, of what is written into in place nothing.
    """
    shares = dict.fromkeys(inside, 0.0)
    for x in reversed(inside.values()):  # operands come before what uses them
        share = 1.0 if x.is_root else min(1.0, shares[x.name])
        shares[x.name] = share
        for index, name in enumerate(x.operands):
            if index == 0 and x.opcode in _TAKING:
                part = x.num_elements() / inside[name].num_elements()
            else:
                part = 0.0 if index == 0 and x.opcode in IN_PLACE else 1.0
            shares[name] += share * part
    return shares


def _update(x: Instruction, computation: Computation) -> Instruction:
    """Return what a scatter or a slice update puts into its target."""
    return computation[x.operands[2 if x.opcode == "scatter" else 1]]


def _operations(dot: Instruction, operands: list[Instruction]) -> int:
    """Return the multiplications and additions of a product."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    assert contracted, dot
    (_, shape), *_ = operands[0].arrays()
    depth = math.prod(shape[int(axis)] for axis in contracted[1].split(","))
    return 2 * dot.num_elements() * depth


def _weights(inside: Computation) -> str:
    """Name the shapes of a product's largest operands."""
    parameters = [x for x in inside.values() if x.opcode == "parameter"]
    largest = max(x.num_elements() for x in parameters)
    shapes = [x.arrays()[0][1] for x in parameters if x.num_elements() * 8 > largest]
    return " and ".join(str(list(shape)) for shape in shapes)
