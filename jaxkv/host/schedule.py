"""What one step does: `Schedule`, and `Plan`, a schedule that is being made."""

import itertools
from operator import attrgetter
from typing import NamedTuple

from jaxkv.host.request import Request
from jaxkv.host.swap_space import SwappedBlocks


class ScheduledRow(NamedTuple):
    """One request's part of a step: its tokens [start, start + num_tokens) run.

    Attributes:
        row: The request's row.
        admission: The request's; if that or its row has changed when the step is
            committed, the row is stale.
        num_samples: Tokens that the step chooses for it: 0 if its last token is not
            among those that run. If it is, 1; with several steps in one each token
            but the first is chosen in the step that it runs in, so num_tokens.
    """

    request: Request
    row: int
    admission: int
    start: int
    num_tokens: int
    num_samples: int

    @property
    def is_stale(self) -> bool:
        """Whether the request ended or lost its blocks since it was scheduled."""
        request = self.request
        return request.row != self.row or request.admission != self.admission


class Swap(NamedTuple):
    """A request's blocks on the way from the device to host memory, or back.

    Attributes:
        swapped: The host's side.
        block_ids: The device's side, one id for each block; NULL_BLOCK: this one is
            not wanted back.
    """

    swapped: SwappedBlocks
    block_ids: tuple[int, ...]


class Schedule(NamedTuple):
    """What one step computes, and the blocks that move before it, in this order.

    Attributes:
        rows: In the order of their row numbers.
        num_steps: Decoding steps that run as one; each row takes part in as many of
            the first ones as it has tokens.
        swap_outs: All read before anything is written: the blocks have new holders.
        swap_ins: Written next.
        copies: (from, to); all read before any is written.
    """

    rows: tuple[ScheduledRow, ...]
    num_steps: int = 1
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)


class Start(NamedTuple):
    """What a request that is admitted need not compute.

    Attributes:
        shared: Full blocks that hold its first tokens.
        num_tokens: Tokens that these and what follows hold.
        copied: A block that holds the rest of them, to be copied: it goes on otherwise.
        swapped: Blocks in host memory that hold the rest of them.
    """

    shared: list[int]
    num_tokens: int
    copied: int | None = None
    swapped: SwappedBlocks | None = None


class Plan:
    """A schedule being made: what each request gets, and the budget that is left."""

    def __init__(self, budget: int):
        self.budget = budget
        self.num_steps = 1
        self.num_reserved = 0  # blocks that running requests may still want
        self.num_tokens: dict[Request, int] = {}
        self.swap_outs: tuple[Swap, ...] = ()
        self.swap_ins: dict[Request, tuple[Swap, ...]] = {}
        self.copies: dict[Request, tuple[int, int]] = {}
        self.victims: set[Request] = set()

    @property
    def is_decoding(self) -> bool:
        """Whether everybody computes one token and gets the next from the device."""
        return all(
            num_tokens == 1
            and request.beams is None
            and request.num_scheduled_tokens == request.num_tokens
            for request, num_tokens in self.num_tokens.items()
        )

    def add(self, request: Request, num_tokens: int) -> None:
        """Let the request compute so many tokens more."""
        self.num_tokens[request] = num_tokens
        self.budget -= num_tokens
        request.num_scheduled_tokens += num_tokens

    def withdraw(self, request: Request) -> None:
        """Take back what the request got, if anything, and what it would begin with."""
        self.swap_ins.pop(request, None)
        self.copies.pop(request, None)
        num_tokens = self.num_tokens.pop(request, 0)
        self.budget += num_tokens
        request.num_scheduled_tokens -= num_tokens

    def schedule(self) -> Schedule:
        """Return what was planned; what the rows choose is pending from now on."""
        rows = []
        for request, num_tokens in self.num_tokens.items():
            assert request.row is not None, f"{request!r} is planned and does not run"
            end = request.num_scheduled_tokens
            num_samples = 0
            if end >= request.num_tokens:
                num_samples = 1 if self.num_steps == 1 else num_tokens
            rows.append(
                ScheduledRow(
                    request,
                    request.row,
                    request.admission,
                    end - num_tokens,
                    num_tokens,
                    num_samples,
                )
            )
            if request.beams is None:
                request.num_pending_tokens += num_samples
        rows.sort(key=attrgetter("row"))
        return Schedule(
            tuple(rows),
            self.num_steps,
            self.swap_outs,
            tuple(itertools.chain.from_iterable(self.swap_ins.values())),
            tuple(self.copies.values()),
        )
