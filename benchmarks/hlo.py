"""Reads a compiled module's text: which instructions make arrays of a pool's size.

The text is `Compiled.as_text()`, of any backend. That is XLA's final program, in which
every copy it will make is spelled out.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of HLO: %name = type opcode(%operands), attributes."""

    name: str
    is_root: bool
    result: str  # the type as written; of several arrays where it is a tuple
    opcode: str
    operands: list[str]
    calls: list[str]  # the computation a fusion holds
    attributes: str  # what stands behind the operands

    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of the arrays that it returns."""
        found = re.findall(r"(\w+)\[([\d,]*)\]", self.result)
        return [(x, tuple(map(int, filter(None, y.split(","))))) for x, y in found]

    def num_elements(self) -> int:
        """Elements of the largest array that it returns."""
        return max((math.prod(shape) for _, shape in self.arrays()), default=0)


Computation = dict[str, Instruction]

HEADER = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
OPCODE = re.compile(r"^(\(.*?\)|[^( ]+) ([\w\-]+)\((.*)$")
# These hand arrays on and make none. What is inside a loop or a branch is looked at
# by itself: where XLA cannot share a carried buffer, it writes an explicit copy.
PLUMBING = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
}
IN_PLACE = {"scatter", "dynamic-update-slice"}


def parse(text: str) -> dict[str, Computation]:
    """{computation: its instructions, by name} of an HLO module's text."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[1], {})
        elif match := LINE.match(line):
            # Layouts go: they may hold parentheses, as in {3,2,1,0:T(8,128)}.
            written = re.sub(r"(\][^ ,]*?)\{[^}]*\}", r"\1", match[3])
            parts = OPCODE.match(written)
            assert parts, line
            operands, _, attributes = parts[3].partition(")")
            current[match[2]] = Instruction(
                name=match[2],
                is_root=bool(match[1]),
                result=parts[1],
                opcode=parts[2],
                operands=re.findall(r"%([\w.\-]+)", operands),
                calls=re.findall(r"calls=%([\w.\-]+)", parts[3]),
                attributes=attributes,
            )
    return computations


def behind_bitcasts(name: str, computation: Computation) -> Instruction:
    """Return what an instruction is of, seen with another shape."""
    while computation[name].opcode == "bitcast":
        name = computation[name].operands[0]
    return computation[name]


def results(computation: Computation) -> list[Instruction]:
    """Return what makes the arrays that a computation returns, behind bitcasts."""
    root = next(x.name for x in computation.values() if x.is_root)
    end = behind_bitcasts(root, computation)
    names = end.operands if end.opcode == "tuple" else [end.name]
    return [behind_bitcasts(name, computation) for name in names]


def is_in_place(instruction: Instruction, computations: dict[str, Computation]) -> bool:
    """Whether an instruction writes into the array it is given.

    So do scatters and slice updates, and fusions that end in one whose target comes
    from outside the fusion.
    """
    if instruction.opcode in IN_PLACE:
        return True
    if instruction.opcode != "fusion":
        return False
    inside = computations[instruction.calls[0]]
    return all(
        end.opcode in IN_PLACE
        and behind_bitcasts(end.operands[0], inside).opcode == "parameter"
        for end in results(inside)
    )


class PoolUse(NamedTuple):
    """What a compiled module does with arrays of a pool's size."""

    num_writes: int  # in place
    made: list[str]  # every other instruction that makes one; should be empty


def pool_use(text: str, pool_elements: int) -> PoolUse:
    """Find what makes arrays of at least half a layer's pool, of any shape or dtype."""
    return _use(text, lambda x: 2 * x.num_elements() >= pool_elements)


def made_of_sizes(text: str, sizes: set[int]) -> list[str]:
    """Find what makes arrays of so many elements, of any shape or dtype."""
    return _use(text, lambda x: x.num_elements() in sizes).made


def _use(text: str, is_wanted: Callable[[Instruction], bool]) -> PoolUse:
    """Find what makes certain arrays.

    Inside a fusion nothing is stored but the result, so only that counts.
    """
    computations = parse(text)
    every = [x for lines in computations.values() for x in lines.values()]
    fused = {name for x in every for name in x.calls}
    num_writes, made = 0, []
    for computation, lines in computations.items():
        for x in lines.values() if computation not in fused else ():
            if x.opcode in PLUMBING or not is_wanted(x):
                continue
            if is_in_place(x, computations):
                num_writes += 1
            else:
                made.append(f"{x.opcode} %{x.name} of {x.result} in %{computation}")
    return PoolUse(num_writes, made)
