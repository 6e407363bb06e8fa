"""Host memory for the K and V of preempted requests: `SwapSpace` counts it."""

from collections.abc import Iterator
from typing import Any


class SwappedBlocks:
    """Blocks of a preempted request in host memory, of those that one step took.

    Attributes:
        first: Place in its block table of the first one; those before it are in the
            prefix cache, where it will find them if nobody takes them.
        num_blocks: How many there are.
        num_tokens: Computed tokens that all its blocks held together.
        content: What the runner made of them; None until the step that swaps them out.
        deeper: Those that follow them, taken earlier; None: there are no more.
    """

    __slots__ = (
        "__weakref__",
        "content",
        "deeper",
        "first",
        "num_blocks",
        "num_tokens",
    )

    def __init__(
        self,
        first: int,
        num_blocks: int,
        num_tokens: int,
        deeper: "SwappedBlocks | None" = None,
    ):
        self.first = first
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.content: Any = None
        self.deeper = deeper

    def __iter__(self) -> "Iterator[SwappedBlocks]":
        """Yield these and what follows them."""
        swapped: SwappedBlocks | None = self
        while swapped is not None:
            yield swapped
            swapped = swapped.deeper

    @property
    def end(self) -> int:
        """Place in the block table past the last one."""
        return self.first + self.num_blocks

    def __repr__(self) -> str:
        return f"SwappedBlocks({self.first}, {self.num_blocks}, {self.num_tokens})"


class SwapSpace:
    """How many blocks fit into host memory, and how many are there.

    There are no block ids: one request's blocks come back together, and their memory
    goes with the objects.

    Attributes:
        num_blocks: Blocks that fit.
        num_used: Blocks that are there, or on their way in or out.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_used = 0

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks more would fit."""
        return self.num_used + num_blocks <= self.num_blocks

    def reserve(self, num_blocks: int) -> bool:
        """Take room for so many blocks.

        Returns:
            Whether there is enough; if not, nothing changed.
        """
        if not self.has_room(num_blocks):
            return False
        self.num_used += num_blocks
        return True

    def release(self, swapped: SwappedBlocks) -> None:
        """Give the room of a request's blocks back."""
        self.num_used -= sum(part.num_blocks for part in swapped)
        assert self.num_used >= 0, f"{swapped!r} was given back twice"
