"""Reads a compiled module's text: which instructions make arrays of a pool's size.

The text is `Compiled.as_text()`, of any backend. That is XLA's final program, in which
every copy it will make is spelled out.
"""

import math
import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of HLO: %name = type opcode(%operands), attributes."""

    name: str
    is_root: bool
    result: str  # the type as written; of several arrays where it is a tuple
    opcode: str
    operands: list[str]
    calls: list[str]  # the computation a fusion holds

    def num_elements(self):
        """Elements of the largest array that it returns."""
        shapes = re.findall(r"\w+\[([\d,]*)\]", self.result)
        sizes = (math.prod(map(int, filter(None, s.split(",")))) for s in shapes)
        return max(sizes, default=0)


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


def parse(text):
    """{computation: its instructions, by name} of an HLO module's text."""
    computations, current = {}, {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[1], {})
        elif match := LINE.match(line):
            # Layouts go: they may hold parentheses, as in {3,2,1,0:T(8,128)}.
            written = re.sub(r"(\][^ ,]*?)\{[^}]*\}", r"\1", match[3])
            parts = OPCODE.match(written)
            assert parts, line
            current[match[2]] = Instruction(
                name=match[2],
                is_root=bool(match[1]),
                result=parts[1],
                opcode=parts[2],
                operands=re.findall(r"%([\w.\-]+)", parts[3].split(")")[0]),
                calls=re.findall(r"calls=%([\w.\-]+)", parts[3]),
            )
    return computations


def is_in_place(instruction, computations):
    """Whether an instruction writes into the array it is given.

    So do scatters and slice updates, and fusions that end in one whose target comes
    from outside the fusion.
    """
    if instruction.opcode in IN_PLACE:
        return True
    if instruction.opcode != "fusion":
        return False
    inside = computations[instruction.calls[0]]

    def behind_bitcasts(name):
        while inside[name].opcode == "bitcast":
            name = inside[name].operands[0]
        return inside[name]

    root = behind_bitcasts(next(x.name for x in inside.values() if x.is_root))
    ends = map(behind_bitcasts, root.operands) if root.opcode == "tuple" else [root]
    return all(
        end.opcode in IN_PLACE
        and behind_bitcasts(end.operands[0]).opcode == "parameter"
        for end in ends
    )


class PoolUse(NamedTuple):
    """What a compiled module does with arrays of a pool's size."""

    num_writes: int  # in place
    made: list[str]  # every other instruction that makes one; should be empty


def pool_use(text, pool_elements):
    """Find what makes arrays of at least half a layer's pool, of any shape or dtype.

    Inside a fusion nothing is stored but the result, so only that counts.
    """
    computations = parse(text)
    every = [x for lines in computations.values() for x in lines.values()]
    fused = {name for x in every for name in x.calls}
    num_writes, made = 0, []
    for computation, lines in computations.items():
        for x in lines.values() if computation not in fused else ():
            if x.opcode in PLUMBING or 2 * x.num_elements() < pool_elements:
                continue
            if is_in_place(x, computations):
                num_writes += 1
            else:
                made.append(f"{x.opcode} %{x.name} of {x.result} in %{computation}")
    return PoolUse(num_writes, made)
