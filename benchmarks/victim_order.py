"""Another order of victims, to be compared with the scheduler's: `ByLacking`.

The scheduler's own order is by work lost for each block that is gained. Here blocks
that are gained beyond those lacking do not count.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxkv.host.block_tables import BlockTables
from jaxkv.host.preemption import Preemption
from jaxkv.host.request import Request
from jaxkv.host.schedule import Plan
from jaxkv.host.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class PreemptionByLacking(Preemption):
    """Sorts victims by work lost / min(blocks gained, blocks lacking).

    Attributes:
        lacking: How many are, as one number in a list; `ByLacking` sets it.
    """

    lacking: list[int] = field(default_factory=lambda: [1])

    def by_work_lost(
        self, units: Iterable[Sequence[Request]], block_tables: BlockTables
    ) -> list[Sequence[Request]]:
        """Sort whom to preempt first, as `Preemption` does but for what is gained."""
        block_size = block_tables.pool.block_size

        def order(unit: Sequence[Request]) -> tuple[int, float, int]:
            names = [request.request_id for request in unit]
            gain = block_tables.reclaimable(names)
            shared = sum(len(block_tables.table(name)) for name in names) - gain
            computed = sum(request.num_computed_tokens for request in unit)
            lost = self.work_lost(gain, max(0, computed - shared * block_size))
            useful = min(gain, self.lacking[0])
            priority, arrival, _ = unit[0].rank
            return -priority, lost / useful if useful else math.inf, -arrival

        return sorted(units, key=order)


class ByLacking(Scheduler):
    """The scheduler, with a `PreemptionByLacking` that knows what is lacking."""

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        target = request.num_scheduled_tokens + num_tokens
        needed = self.block_tables.blocks_needed(request.request_id, target)
        if isinstance(self.preemption, PreemptionByLacking):
            self.preemption.lacking[0] = max(1, needed - self.pool.num_available)
        return super()._make_room(request, num_tokens, plan)
