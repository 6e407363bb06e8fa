"""What happens between one request and the blocks: find, take, fill, give back.

A request that waits owns no block; what was swapped out lies in host memory. It starts
from blocks that it finds, forks or gets back, takes more as its tokens are scheduled,
and publishes what it has filled. `Scheduler` says when.
"""

from collections.abc import Collection, Iterable, Sequence

from jaxkv.config import NULL_BLOCK
from jaxkv.host.block_pool import BlockPool
from jaxkv.host.block_tables import BlockTables
from jaxkv.host.preemption import Preemption
from jaxkv.host.prefix_cache import PrefixCache
from jaxkv.host.request import Request
from jaxkv.host.schedule import Plan, Start, Swap
from jaxkv.host.swap_space import SwappedBlocks, SwapSpace


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
        # Cached blocks that victims will want: whose, its place, of which preemption.
        self._left: dict[int, tuple[Request, int, int]] = {}
        self._swap_outs: dict[SwappedBlocks, list[int]] = {}  # of this schedule
        pool.on_evict = self._swap_out_taken

    def num_to_come(self, request: Request) -> int:
        """Return the blocks it will take for its known tokens and one block more."""
        known = self.block_tables.blocks_for(request.num_tokens)
        at_most = self.block_tables.blocks_for(request.max_total_tokens - 1)
        held = len(self.block_tables.table(request.request_id))
        return min(known + 1, at_most) - held

    def num_wasted_slots(self, running: Iterable[Request]) -> int:
        """Return the slots of held blocks that have no computed token."""
        computed = sum(request.num_computed_tokens for request in running)
        # What is shared is full, and was counted for each that shares it.
        shared = self.block_tables.num_references - self.pool.num_held
        return (self.pool.num_held + shared) * self.pool.block_size - computed

    def reclaimable(
        self, units: Iterable[Sequence[Request]], less: Collection[int] = ()
    ) -> int:
        """Return how many blocks nobody but these requests holds, `less` aside."""
        request_ids = [request.request_id for unit in units for request in unit]
        return self.block_tables.reclaimable(request_ids, less)

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
        for block_id in start.shared if request.num_preemptions else ():
            if self._left.get(block_id, (None,))[0] is request:
                del self._left[block_id]
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
            plan.copies[request] = start.copied, table[num_shared]
        if start.swapped is None:
            self.drop_swapped(request)
        else:
            wanted = [NULL_BLOCK] * num_shared + table[num_shared:]
            plan.swap_ins[request] = tuple(
                Swap(part, tuple(wanted[part.first : part.end]))
                for part in start.swapped
            )
        plan.add(request, num_tokens)

    def fill(self, request: Request, num_tokens: int) -> None:
        """Count and publish what a committed step has computed for a request."""
        request.source = None
        num_before = request.num_computed_tokens
        if request.swapped is not None:
            self.drop_swapped(request)
            num_before = 0  # what came back from host memory is published again
        request.num_computed_tokens += num_tokens
        block_size = self.pool.block_size
        # This runs for every row of every step, and few of them have filled a block.
        if request.num_computed_tokens // block_size > num_before // block_size:
            table = self.block_tables.table(request.request_id)
            self.prefix_cache.publish(request, table, num_before)

    def unfill(self, request: Request, start: int) -> bool:
        """Take back the blocks of a step that failed, from token `start` on.

        Returns:
            Whether the request has what it had before; if not, what it began with in
            that step may not have arrived, and it must begin anew.
        """
        request.num_scheduled_tokens = start
        self.block_tables.truncate(request.request_id, start)
        return request.source is None and request.swapped is None

    def swap_out(self, request: Request, preemption: Preemption) -> None:
        """Let a victim have its blocks from host memory, if that is the better way.

        What it leaves in the prefix cache is copied only when somebody takes it, what
        nobody could find there at once: so whichever way it gets them back, only what
        was taken costs anything.
        """
        if request.beams is not None:  # what they share would be copied for each
            return
        if request.swapped is not None or request.source is not None:
            return  # it was admitted a moment ago: nothing has arrived yet
        table = self.block_tables.table(request.request_id)
        first = self.prefix_cache.num_shared(request, table)
        num_tokens = request.num_computed_tokens
        end = self.block_tables.blocks_for(num_tokens)
        num_lost = num_tokens - first * self.pool.block_size
        if num_lost <= 0 or not preemption.swaps(end - first, num_lost):
            return
        if not self.swap_space.has_room(end - first):
            return
        num_cached = first + self.prefix_cache.num_findable(request, table, first)
        if num_cached < end:
            self._add_swapped(request, num_cached, num_tokens, table[num_cached:end])
        for place in range(first, num_cached):
            self._left[table[place]] = request, place, request.num_preemptions + 1

    def _swap_out_taken(self, block_id: int, digest: bytes) -> None:
        """Copy a block that somebody takes from the prefix cache, if a victim left it.

        It is of use only right before those that are in host memory.
        """
        request, place, preemption = self._left.pop(block_id, (None, 0, 0))
        if request is None or request.row is not None:
            return
        if request.finish_reason is not None or request.num_preemptions != preemption:
            return
        if request.swapped is None:  # all that it had was in the cache
            num_tokens = (place + 1) * self.pool.block_size
        elif request.swapped.first == place + 1:
            num_tokens = request.swapped.num_tokens
        else:
            return
        self._add_swapped(request, place, num_tokens, [block_id])

    def _add_swapped(
        self, request: Request, first: int, num_tokens: int, block_ids: list[int]
    ) -> None:
        """Plan to copy a waiting request's blocks, if there is room for them."""
        if not self.swap_space.reserve(len(block_ids)):
            return
        swapped = request.swapped
        if swapped is not None and swapped in self._swap_outs:
            swapped.first = first
            swapped.num_blocks += len(block_ids)
            self._swap_outs[swapped][:0] = block_ids
        else:
            request.swapped = SwappedBlocks(first, len(block_ids), num_tokens, swapped)
            self._swap_outs[request.swapped] = block_ids

    def take_swap_outs(self) -> tuple[Swap, ...]:
        """Return what must be copied to host memory before the step."""
        swaps = tuple(Swap(s, tuple(ids)) for s, ids in self._swap_outs.items())
        self._swap_outs.clear()
        return swaps

    def drop_swapped(self, request: Request) -> None:
        """Give up what the request has in host memory, if anything."""
        if request.swapped is not None:
            self.swap_space.release(request.swapped)
            request.swapped = None

    def drop_unfinished_swaps(self, request: Request) -> None:
        """Give up what a step that failed has not copied, and all with it."""
        if any(part.content is None for part in request.swapped or ()):
            self.drop_swapped(request)

    def reset(self, waiting: Iterable[Request]) -> None:
        """Forget every cached block and every one in host memory."""
        self.prefix_cache.reset(waiting)
        self._left.clear()
        for request in waiting:
            self.drop_swapped(request)

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
            assert scheduled <= request.num_tokens, f"{request!r}"
            held = len(self.block_tables.table(request.request_id))
            assert held == self.block_tables.blocks_for(scheduled), f"{request!r}"
        parts = [part for r in (*running, *waiting) for part in r.swapped or ()]
        used = sum(part.num_blocks for part in parts)
        assert used == self.swap_space.num_used, f"{parts} of {self.swap_space!r}"
        assert used <= self.swap_space.num_blocks, f"{parts} do not fit"
        for part in parts:
            assert part.deeper is None or part.end == part.deeper.first, f"{parts}"
