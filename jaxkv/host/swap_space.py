"""Host memory for the K and V of preempted requests: `SwapSpace` counts it."""

from typing import Any


class SwappedBlocks:
    """A preempted request's blocks in host memory.

    Attributes:
        first: Place in its block table of the first one; those before it are held by
            others too, and it will find them in the prefix cache.
        num_blocks: How many there are.
        num_tokens: Computed tokens that all its blocks held together.
        content: What the runner made of them; None until the step that swaps them out.
    """

    __slots__ = ("__weakref__", "content", "first", "num_blocks", "num_tokens")

    def __init__(self, first: int, num_blocks: int, num_tokens: int):
        self.first = first
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.content: Any = None

    @property
    def end(self) -> int:
        """Place in the block table past the last one."""
        return self.first + self.num_blocks

    def __repr__(self) -> str:
        return f"SwappedBlocks({self.first}, {self.num_blocks}, {self.num_tokens})"


class SwapSpace:
    """How many blocks fit into host memory, and how many are there.

    There are no block ids: what is swapped out together comes back together, so one
    request's blocks are kept as one and their memory goes with the object.

    Attributes:
        num_blocks: Blocks that fit.
        num_used: Blocks that are there, or on their way in or out.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_used = 0

    def reserve(
        self, first: int, num_blocks: int, num_tokens: int
    ) -> SwappedBlocks | None:
        """Take room for a request's blocks; see `SwappedBlocks`.

        Returns:
            None if there is not enough; then nothing changed.
        """
        if self.num_used + num_blocks > self.num_blocks:
            return None
        self.num_used += num_blocks
        return SwappedBlocks(first, num_blocks, num_tokens)

    def release(self, swapped: SwappedBlocks) -> None:
        """Give the room of a request's blocks back."""
        self.num_used -= swapped.num_blocks
        assert self.num_used >= 0, f"{swapped!r} was given back twice"
