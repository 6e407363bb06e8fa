"""What happens between one request and the blocks: find, take, fill, give back.

A request that waits owns no block; what was swapped out lies in host memory. It starts
from blocks that it finds, forks or gets back, takes more as its tokens are scheduled,
and publishes what it has filled. `Scheduler` says when.
"""

from collections.abc import Iterable, Sequence

from jaxkv.config import NULL_BLOCK
from jaxkv.host.block_pool import BlockPool
from jaxkv.host.block_tables import BlockTables
from jaxkv.host.preemption import Preemption
from jaxkv.host.prefix_cache import PrefixCache
from jaxkv.host.request import Request
from jaxkv.host.schedule import Plan, Start, Swap
from jaxkv.host.swap_space import SwapSpace


class RequestBlocks:
    """All requests' blocks, on the device and in host memory.

    Attributes:
        pool: The blocks.
        block_tables: Who holds them.
        prefix_cache: Who finds which of them.
        swap_space: Room for blocks in host memory.
    """

    def __init__(self, pool: BlockPool, num_swap_blocks: int):
        """Make it for an unused pool; nobody has a block."""
        self.pool = pool
        self.block_tables = BlockTables(pool)
        self.prefix_cache = PrefixCache(pool)
        self.swap_space = SwapSpace(num_swap_blocks)

    def num_to_come(self, request: Request) -> int:
        """Return the blocks it will take for its known tokens and one block more."""
        known = self.block_tables.blocks_for(len(request.token_ids))
        at_most = self.block_tables.blocks_for(request.max_total_tokens - 1)
        held = len(self.block_tables.table(request.request_id))
        return min(known + 1, at_most) - held

    def num_wasted_slots(self, running: Iterable[Request]) -> int:
        """Return the slots of held blocks that have no computed token."""
        computed = sum(request.num_computed_tokens for request in running)
        # What is shared is full, and was counted for each that shares it.
        shared = self.block_tables.num_references - self.pool.num_held
        return (self.pool.num_held + shared) * self.pool.block_size - computed

    def reclaimable(self, units: Iterable[Sequence[Request]]) -> int:
        """Return how many blocks nobody but these requests holds."""
        return self.block_tables.reclaimable(r.request_id for u in units for r in u)

    def find_start(self, request: Request) -> Start | None:
        """Return where a waiting request can start; None: others compute it now."""
        block_size = self.pool.block_size
        source = request.source
        if source is not None and source.finish_reason is not None:
            source = request.source = None
        if source is None:
            found = self.prefix_cache.find(request)
            swapped = request.swapped
            if (
                swapped is not None
                and swapped.first <= len(found)
                and len(found) * block_size < swapped.num_tokens
            ):
                return Start(found, swapped.num_tokens, swapped=swapped)
            if self.prefix_cache.is_pending(request, found):
                return None
            return Start(found, len(found) * block_size)
        # The last token always runs: its logits are needed.
        num_tokens = min(request.num_source_tokens, len(request.token_ids) - 1)
        if source.num_computed_tokens < num_tokens:
            return None
        table = self.block_tables.table(source.request_id)
        num_full, num_rest = divmod(num_tokens, block_size)
        return Start(
            table[:num_full], num_tokens, table[num_full] if num_rest else None
        )

    def begin(
        self, request: Request, start: Start, num_tokens: int, plan: Plan
    ) -> None:
        """Give a request that is admitted what it starts with, and so many tokens."""
        self.block_tables.adopt(request.request_id, start.shared)
        request.num_computed_tokens = start.num_tokens
        request.num_scheduled_tokens = start.num_tokens
        num_shared = len(start.shared)
        self.prefix_cache.admit(request, num_shared)
        target = request.num_computed_tokens + num_tokens
        grown = self.block_tables.grow(request.request_id, target)
        assert grown, f"{request!r} was admitted without room"
        table = self.block_tables.table(request.request_id)
        if start.copied is not None:
            plan.copies.append((start.copied, table[num_shared]))
        if start.swapped is None:
            self.drop_swapped(request)
        else:
            first, end = start.swapped.first, start.swapped.end
            unwanted = (NULL_BLOCK,) * (num_shared - first)
            block_ids = unwanted + tuple(table[num_shared:end])
            plan.swap_ins.append(Swap(start.swapped, block_ids))
        plan.add(request, num_tokens)

    def fill(self, request: Request, num_tokens: int) -> None:
        """Count and publish what a committed step has computed for a request."""
        request.source = None
        # What came back from host memory is published again.
        num_before = 0 if request.swapped is not None else request.num_computed_tokens
        self.drop_swapped(request)
        request.num_computed_tokens += num_tokens
        table = self.block_tables.table(request.request_id)
        self.prefix_cache.publish(request, table, num_before)

    def unfill(self, request: Request) -> bool:
        """Take back the blocks of a step that failed.

        Returns:
            Whether the request has what it had before; if not, what it began with in
            that step may not have arrived, and it must begin anew.
        """
        request.num_scheduled_tokens = request.num_computed_tokens
        self.block_tables.truncate(request.request_id, request.num_computed_tokens)
        return request.source is None and request.swapped is None

    def swap_out(self, request: Request, preemption: Preemption, plan: Plan) -> None:
        """Plan to copy a victim's blocks to host memory, if that is the better way."""
        if request.beams is not None:  # what they share would be copied for each
            return
        table = self.block_tables.table(request.request_id)
        first = self.prefix_cache.num_shared(request, table)
        num_tokens = request.num_computed_tokens
        num_blocks = self.block_tables.blocks_for(num_tokens) - first
        num_lost = num_tokens - first * self.pool.block_size
        if num_lost <= 0 or not preemption.swaps(num_blocks, num_lost):
            return
        request.swapped = self.swap_space.reserve(first, num_blocks, num_tokens)
        if request.swapped is not None:
            block_ids = tuple(table[first : first + num_blocks])
            plan.swap_outs.append(Swap(request.swapped, block_ids))

    def drop_swapped(self, request: Request) -> None:
        """Give up what the request has in host memory, if anything."""
        if request.swapped is not None:
            self.swap_space.release(request.swapped)
            request.swapped = None

    def give_back(self, request: Request) -> None:
        """Give back all of a request's blocks on the device."""
        self.prefix_cache.withdraw(request)
        self.block_tables.release(request.request_id)

    def check_invariants(
        self, running: Sequence[Request], waiting: Iterable[Request]
    ) -> None:
        """Assert that blocks and requests agree."""
        self.block_tables.check_invariants()
        self.prefix_cache.check_invariants(running)
        owners = self.block_tables.request_ids()
        assert owners <= {r.request_id for r in running}, f"{owners} own blocks"
        for request in running:
            scheduled = request.num_scheduled_tokens
            assert request.num_computed_tokens <= scheduled, f"{request!r}"
            assert scheduled <= len(request.token_ids), f"{request!r}"
            held = len(self.block_tables.table(request.request_id))
            assert held == self.block_tables.blocks_for(scheduled), f"{request!r}"
        swapped = [r.swapped for r in (*running, *waiting) if r.swapped is not None]
        used = sum(blocks.num_blocks for blocks in swapped)
        assert used == self.swap_space.num_used, f"{swapped} of {self.swap_space!r}"
        assert used <= self.swap_space.num_blocks, f"{swapped} do not fit"
