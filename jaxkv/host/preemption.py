"""Who loses its blocks when they run out, and how it gets them back.

A victim is never more urgent than the request it makes room for (`Request.rank`), so
two requests never preempt each other back and forth. Among those, whoever loses the
least work for each block that is gained goes first. What counts is the blocks that only
the victims hold: giving back a shared block frees nothing, and its content is found
again. What a victim loses is brought back by copying it to host memory and back
(swap), or by computing it again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxkv.host.block_tables import BlockTables
from jaxkv.host.request import Request


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How preempted requests come back, and how long that is estimated to take.

    Attributes:
        how: `swap` and `recompute` are what they say, as far as host memory goes;
            `auto` takes whichever is estimated to be faster.
        bytes_per_block: Of K and V in all layers.
        swap_bandwidth: Bytes a second between device and host, either way.
        prefill_rate: Tokens a second that are computed again.
    """

    how: Literal["auto", "swap", "recompute"] = "recompute"
    bytes_per_block: float = 1.0
    swap_bandwidth: float = 1.0
    prefill_rate: float = 1.0

    def swap_seconds(self, num_blocks: int) -> float:
        """Return the time it takes to copy so many blocks out and in.

        Of a victim's blocks only those are copied that others take, and only those
        would be computed again; so which is faster does not depend on how many.
        """
        return 2 * num_blocks * self.bytes_per_block / self.swap_bandwidth

    def recompute_seconds(self, num_tokens: int) -> float:
        """Return the time it takes to compute so many tokens again."""
        return num_tokens / self.prefill_rate

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to swap so many blocks rather than recompute so many tokens."""
        if self.how == "auto":
            return self.swap_seconds(num_blocks) < self.recompute_seconds(num_tokens)
        return self.how == "swap"

    def work_lost(self, num_blocks: int, num_tokens: int) -> float:
        """Return the seconds it takes to bring so much back."""
        if self.swaps(num_blocks, num_tokens):
            return self.swap_seconds(num_blocks)
        return self.recompute_seconds(num_tokens)

    def by_work_lost(
        self, units: Iterable[Sequence[Request]], block_tables: BlockTables
    ) -> list[Sequence[Request]]:
        """Sort whom to preempt first: what is lost for each block that is gained.

        Before that comes priority, the least urgent first, and after it arrival, the
        latest first.
        """
        block_size = block_tables.pool.block_size

        def order(unit: Sequence[Request]) -> tuple[int, float, int]:
            request_ids = [request.request_id for request in unit]
            gain = block_tables.reclaimable(request_ids)
            held = sum(len(block_tables.table(i)) for i in request_ids)
            num_computed = sum(request.num_computed_tokens for request in unit)
            num_lost = max(0, num_computed - (held - gain) * block_size)
            lost = self.work_lost(gain, num_lost)
            priority, arrival, _ = unit[0].rank
            return -priority, lost / gain if gain else math.inf, -arrival

        return sorted(units, key=order)


def units_of(running: Sequence[Request]) -> list[Sequence[Request]]:
    """Return the running requests, those that are preempted together as one unit."""
    first_of = {request.unit[0]: request.unit for request in running}
    return list(first_of.values())


def choose_victims[T](
    candidates: Sequence[T], is_enough: Callable[[Sequence[T]], bool]
) -> list[T]:
    """Choose whom to preempt.

    Args:
        candidates: Whom one may preempt, those that lose least first.
        is_enough: Whether preempting all the given ones gives the room that is
            needed; more of them never give less.

    Returns:
        As few of the first as are enough, none of whom can be left out; nobody if all
        of them together are not enough, so that nobody loses blocks for nothing.
    """
    victims: list[T] = []
    for candidate in candidates:
        victims.append(candidate)
        if is_enough(victims):
            break
    else:
        return []
    for victim in victims[-2::-1]:  # without the last it was not enough
        others = [other for other in victims if other is not victim]
        if is_enough(others):
            victims = others
    return victims
