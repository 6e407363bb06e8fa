"""What runs in the next step: `Scheduler`, the only place that takes or gives blocks.

There is no prefill and no decode phase: a request has tokens, some of them computed,
and a step computes the next few of several requests within one token budget.

    add -> waiting --admit--> running --commit--> finished
              ^                  |
              +-----preempt------+    (all blocks given back; swapped out before, or
                                       recomputed later)

The rules of one `schedule`. Requests are in the order of their arrival, or, with
`policy="priority"`, of their priority and then of their arrival:

1. Running requests that lack one token get it. Then the others continue their
   prompts, as far as the budget goes; `long_prefill_token_threshold` leaves part of
   it to those behind. Waiting requests of a strictly better priority come before
   those.
2. Who lacks blocks preempts requests that come later in it, or gives way itself
   (`preemption.py`).
3. Waiting requests are admitted in order; nobody is skipped, but who needs a block
   that somebody else is computing lets others pass until it can find it in the cache.
   The head waits until there is a row, budget, a place among the partial prefills (of
   requests as urgent or more) unless its prompt ends within this step, and room: every
   running request and the new one must be able to finish its known tokens and grow by
   one block more, where it still can grow. So whoever is admitted is not thrown out
   again before it has got anywhere, and a victim, whose blocks went to somebody else,
   is not admitted in the same step. Where a row or room is lacking, requests of a
   strictly worse priority are preempted for the head, if that is enough for it.
4. Beams of a search that is under way are running ones: those that wait for a row or
   room come before the head, and may preempt whatever is less urgent.

The first running request can always grow (everybody else's blocks are its to
take), and an idle scheduler can always admit, so every step does some work.
"""

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from jaxkv.host.block_pool import BlockPool
from jaxkv.host.preemption import Preemption, choose_victims, units_of
from jaxkv.host.request import Request, check_beams_fit, max_total_tokens
from jaxkv.host.request_blocks import RequestBlocks
from jaxkv.host.schedule import Plan, Schedule, ScheduledRow, Start

_by_rank = attrgetter("rank")


def _by_priority(request: Request) -> int:
    return request.rank[0]


class Scheduler:
    """The queues, and the decisions about tokens, rows and blocks.

    Use: `add` and `abort` at any time; `schedule`, run the step, `commit`; or
    `discard` if the step failed. Where `can_run_ahead` says so, the next step may be
    scheduled before the last one is committed; steps are committed in their order, and
    discarded in the opposite one. It belongs to one thread.

    Attributes:
        pool: The blocks.
        block_tables: Who holds them.
        prefix_cache: Who finds which of them.
        swap_space: Room for blocks in host memory.
        preemption: How preempted requests come back.
        multi_step: Most decoding steps in one.
        num_preemptions: Preemptions so far.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "fcfs",
        enable_prefix_caching: bool = True,
        max_num_partial_prefills: int = 1,
        long_prefill_token_threshold: int = 0,
        num_swap_blocks: int = 0,
        preemption: Preemption | None = None,
        multi_step: int = 1,
        root: bytes = b"",
    ):
        """Make an idle scheduler with a pool of its own; see `EngineConfig`.

        With `num_swap_blocks` so many blocks fit into host memory; without `preemption`
        victims recompute. Steps in which everybody decodes run as `multi_step` steps in
        one. Digests of blocks start from `root`.

        Raises:
            ValueError: The budget is below max_num_seqs, or the pool has no block.
        """
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} must be at least "
                f"max_num_seqs {max_num_seqs}"
            )
        self.policy = policy
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_partial_prefills = max_num_partial_prefills
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching, root)
        self._blocks = RequestBlocks(self.pool, num_swap_blocks)
        self.block_tables = self._blocks.block_tables
        self.prefix_cache = self._blocks.prefix_cache
        self.swap_space = self._blocks.swap_space
        self.preemption = preemption or Preemption()
        self.multi_step = multi_step
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}  # unfinished ones
        self._waiting: deque[Request] = deque()  # in order of urgency
        self._running: list[Request] = []  # likewise
        self._free_rows = list(range(max_num_seqs))  # a heap
        self._num_arrivals = 0
        self._num_admissions = 0

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have neither row nor blocks."""
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        """Those of them that have blocks in host memory."""
        return sum(request.swapped is not None for request in self._waiting)

    @property
    def num_held_slots(self) -> int:
        """Slots of held blocks."""
        return self.pool.num_held * self.pool.block_size

    @property
    def num_wasted_slots(self) -> int:
        """Slots of held blocks without a computed token; ask after `commit`."""
        return self._blocks.num_wasted_slots(self._running)

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request behind all that are as urgent.

        Raises:
            ValueError: Its id is taken, or it could never fit or generate a token.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        max_total_tokens(
            request.num_prompt_tokens,
            request.max_total_tokens - request.num_prompt_tokens,
            max_model_len=request.max_total_tokens,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
        )
        check_beams_fit(
            len(request.unit),
            request.num_prompt_tokens,
            request.max_total_tokens,
            max_num_seqs=self._max_num_seqs,
            num_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
        )
        priority = request.priority if self.policy == "priority" else 0
        for place, member in enumerate(request.unit):
            member.arrival = self._num_arrivals
            member.rank = (priority, member.arrival, place)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        bisect.insort(self._waiting, request, key=_by_rank)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, also between `schedule` and `commit`.

        Returns:
            The request, with finish_reason "abort"; None if there is none unfinished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        for member in request.unit:
            member.finish_reason = "abort"
            if member.row is None and member.request_id in self._requests:
                self._waiting.remove(member)
                self._blocks.drop_swapped(member)
                del self._requests[member.request_id]
        self._retire([r for r in request.unit if r.row is not None])
        return request

    def reset_prefix_cache(self) -> None:
        """Forget every cached block, those in host memory too; who runs goes on."""
        self._blocks.reset(self._waiting)

    def can_run_ahead(self) -> bool:
        """Whether the next step may be scheduled before the last one is committed.

        Not if it might preempt somebody: who is on the way may be about to end, and
        what it has computed on the way would be lost. Nor while beams run, whose next
        tokens the host chooses.
        """
        if any(request.beams is not None for request in self._running):
            return False
        if self._waiting and self.policy == "priority":
            worst = self._running[-1] if self._running else self._waiting[0]
            if self._waiting[0].rank[0] < worst.rank[0]:
                return False
        needed = 0
        for request in self._running:
            num_tokens = min(
                request.num_unscheduled_tokens, self.max_num_batched_tokens
            )
            needed += self.block_tables.blocks_needed(
                request.request_id, request.num_scheduled_tokens + num_tokens
            )
        return needed <= self.pool.num_available

    def schedule(self) -> Schedule:
        """Decide the next step: allocate, preempt and admit.

        Returns:
            The step; it has rows whenever there are unfinished requests and every
            earlier schedule was committed or discarded.
        """
        plan = Plan(self.max_num_batched_tokens)
        try:
            self._make(plan)
        except BaseException:
            self._blocks.take_swap_outs()
            self.discard(plan.schedule())
            raise
        plan.swap_outs = self._blocks.take_swap_outs()
        return plan.schedule()

    def _make(self, plan: Plan) -> None:
        """Fill a plan by the rules of this module."""
        decodes = [r for r in self._running if r.num_unscheduled_tokens == 1]
        prefills = [r for r in self._running if r.num_unscheduled_tokens > 1]
        self._plan_running(decodes, plan)
        # Before those of each priority comes who waits with a better one.
        for priority, equals in itertools.groupby(prefills, key=_by_priority):
            if self._waiting and self._waiting[0].rank[0] < priority:
                self._admit_waiting(plan, before=priority)
            self._plan_running(list(equals), plan)
        self._admit_waiting(plan)
        if self.multi_step > 1 and plan.is_decoding:
            self._plan_more_steps(plan)

    def _plan_more_steps(self, plan: Plan) -> None:
        """Let all that decode go on within the step, as far as there are blocks."""
        for num_more in range(self.multi_step - 1, 0, -1):
            targets = {
                request: min(
                    request.num_scheduled_tokens + num_more,
                    request.max_total_tokens - 1,
                )
                for request in plan.num_tokens
            }
            needed = sum(
                self.block_tables.blocks_needed(request.request_id, target)
                for request, target in targets.items()
            )
            if needed <= self.pool.num_available:
                break
        else:
            return
        for request, target in targets.items():
            grown = self.block_tables.grow(request.request_id, target)
            assert grown, f"{needed} blocks were there for all, but not for {request!r}"
            plan.num_tokens[request] += target - request.num_scheduled_tokens
            request.num_scheduled_tokens = target
        if any(num_tokens > 1 for num_tokens in plan.num_tokens.values()):
            plan.num_steps = self.multi_step

    def commit(
        self,
        schedule: Schedule,
        sampled: Sequence[int | None] | Sequence[Sequence[int]] | np.ndarray,
    ) -> list[Request]:
        """Take a step's results: count its tokens, append new ones, end requests.

        Args:
            schedule: What ran. Rows whose request was aborted meanwhile are ignored.
            sampled: One token for each of its rows, or, of several steps in one, one
                for each step; ignored for those that do not sample.

        Returns:
            The requests that got a token, the ended ones among them.

        Raises:
            ValueError: There is not one token for each row.
        """
        tokens: Sequence = (
            sampled.tolist() if isinstance(sampled, np.ndarray) else sampled
        )
        if len(tokens) != len(schedule.rows):
            raise ValueError(
                f"{len(tokens)} sampled tokens for {len(schedule.rows)} rows"
            )
        updated = []
        for scheduled, chosen in zip(schedule.rows, tokens, strict=True):
            if scheduled.is_stale:
                continue
            request = scheduled.request
            if scheduled.num_samples == 0 or request.beams is not None:
                self._blocks.fill(request, scheduled.num_tokens)
                continue
            request.num_pending_tokens -= scheduled.num_samples
            row_tokens = [chosen] if schedule.num_steps == 1 else chosen
            self._take_tokens(scheduled, row_tokens[: scheduled.num_samples])
            updated.append(request)
        ended = [request for request in updated if request.finish_reason is not None]
        if ended:
            self._retire(ended)
        return updated

    def _take_tokens(self, scheduled: ScheduledRow, tokens: Sequence[int]) -> None:
        """Append what a row has chosen, until it ends; count what it has computed."""
        request = scheduled.request
        num_unused = 0  # chosen, and computed, behind the end
        for number, token in enumerate(tokens, start=1):
            request.append_token(token)
            if request.finish_reason is not None:
                num_unused = len(tokens) - number
                break
        self._blocks.fill(request, scheduled.num_tokens - num_unused)

    def discard(self, schedule: Schedule) -> None:
        """Forget a step that failed: its tokens will be scheduled again."""
        for scheduled in schedule.rows:
            request = scheduled.request
            if scheduled.is_stale:
                continue
            if request.beams is None:
                request.num_pending_tokens -= scheduled.num_samples
            if not self._blocks.unfill(request, scheduled.start):
                self._requeue(request)
        for request in self._waiting:
            self._blocks.drop_unfinished_swaps(request)
        self._running = [r for r in self._running if r.row is not None]

    def _plan_running(self, requests: Sequence[Request], plan: Plan) -> None:
        """Plan for these running requests, preempting where blocks run out."""
        num_preemptions = self.num_preemptions
        for request in requests:
            if request.row is None:  # preempted a moment ago
                continue
            num_tokens = self._chunk(request, plan.budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, plan):
                plan.add(request, num_tokens)
        if self.num_preemptions > num_preemptions:
            self._running = [r for r in self._running if r.row is not None]

    def _chunk(self, request: Request, budget: int) -> int:
        """Return how many of the request's next tokens may run in this step."""
        return self._at_most(request.num_unscheduled_tokens, budget)

    def _at_most(self, num_tokens: int, budget: int) -> int:
        num_tokens = min(num_tokens, budget)
        if self.long_prefill_token_threshold:
            num_tokens = min(num_tokens, self.long_prefill_token_threshold)
        return num_tokens

    def _make_room(self, request: Request, num_tokens: int, plan: Plan) -> bool:
        """Grow a running request's table, preempting if need be, maybe itself."""
        request_id = request.request_id
        target = request.num_scheduled_tokens + num_tokens
        if self.block_tables.grow(request_id, target):
            return True
        needed = self.block_tables.blocks_needed(request_id, target)
        shortfall = needed - self.pool.num_available
        own = request.unit
        victims = choose_victims(
            self._candidates(after=own),
            lambda units: self._blocks.reclaimable(units) >= shortfall,
        )
        for unit in victims or [own]:
            self._preempt(unit, plan)
        if request.row is None:
            return False
        grown = self.block_tables.grow(request_id, target)
        assert grown, f"{victims} gave too few blocks for {request!r}"
        return True

    def _candidates(self, after: Sequence[Request]) -> list[Sequence[Request]]:
        """Return whom these requests may preempt, who loses least for a block first."""
        last = max(request.rank for request in after)
        units = [u for u in units_of(self._running) if min(r.rank for r in u) > last]
        return self.preemption.by_work_lost(units, self.block_tables)

    def _preempt(self, unit: Sequence[Request], plan: Plan) -> None:
        """Take everything from running requests and put them back in the queue.

        The caller removes them from the running ones.
        """
        live = [r for r in unit if r.request_id in self._requests]
        plan.victims.update(live)
        # Who would copy a victim's block in this step would come too late.
        for fork in [r for r in plan.copies if r.source in live and r not in live]:
            self._preempt(fork.unit, plan)
        for request in live:
            if request.row is not None:
                plan.withdraw(request)
                self._blocks.swap_out(request, self.preemption)
                self._requeue(request)
                request.num_preemptions += 1
                self.num_preemptions += 1
        # Of several beams one computes again what they have in common.
        source, *others = live
        source.source = None
        for request in others:
            request.fork(source, request.token_ids)

    def _requeue(self, request: Request) -> None:
        self._vacate(request)
        request.num_computed_tokens = 0
        request.num_scheduled_tokens = 0
        request.num_pending_tokens = 0
        bisect.insort(self._waiting, request, key=_by_rank)

    def _admit_waiting(self, plan: Plan, before: float = math.inf) -> None:
        """Admit from the head of the queue until something is lacking.

        Only requests of a better priority than `before` are admitted. Before the head
        come beams whose search is under way: those of it that run wait for them, so
        they can wait for nobody who waits for these.
        """
        if not (self._waiting and plan.budget):
            return
        plan.num_reserved = self._num_reserved()
        for request in self._beams_under_way():
            if request in plan.victims or self._try_admit(request, plan) is False:
                return
        sharing: list[Request] = []
        while self._waiting and plan.budget:
            request = self._waiting[0]
            if request in plan.victims or request.rank[0] >= before:
                break
            admitted = self._try_admit(request, plan)
            if admitted is None:
                sharing.append(self._waiting.popleft())
            elif not admitted:
                break
        self._waiting.extendleft(reversed(sharing))

    def _num_reserved(self) -> int:
        """Return how many blocks running requests may still want."""
        return sum(map(self._blocks.num_to_come, self._running))

    def _beams_under_way(self) -> list[Request]:
        """Return the waiting beams of searches of which others run."""
        if not any(request.beams is not None for request in self._running):
            return []
        return [request for request in self._waiting if _is_under_way(request)]

    def _try_admit(self, request: Request, plan: Plan) -> bool | None:
        """Let a waiting request run, preempting others if need be and it may.

        Returns:
            Whether it does; None if it lacks nothing but blocks that others compute.
        """
        while plan.budget and (self._free_rows or self._may_preempt(request)):
            start = self._blocks.find_start(request)
            if start is None:
                return None
            num_left = len(request.token_ids) - start.num_tokens
            num_tokens = self._at_most(num_left, plan.budget)
            if num_tokens < num_left and not self._may_be_partial(request):
                return False
            num_held = sum(self.pool.ref_count(block) > 0 for block in start.shared)
            wanted = self._blocks.num_to_come(request) - num_held
            shortfall = plan.num_reserved + wanted - self.pool.num_available
            if shortfall <= 0 and self._free_rows:
                self._admit(request, start, num_tokens, plan)
                plan.num_reserved += self._blocks.num_to_come(request)
                return True
            if not self._make_way(request, start, shortfall, plan):
                return False
            plan.num_reserved = self._num_reserved()
        return False

    def _may_be_partial(self, request: Request) -> bool:
        """Whether one prompt more may be part way; less urgent ones do not count."""
        others = (r for r in self._running if r.rank[0] <= request.rank[0])
        num_partial = sum(other.num_unscheduled_tokens > 0 for other in others)
        return num_partial < self.max_num_partial_prefills

    def _may_preempt(self, request: Request) -> bool:
        """Whether others may be preempted so that a waiting request can run."""
        return self.policy == "priority" or _is_under_way(request)

    def _make_way(
        self, request: Request, start: Start, shortfall: int, plan: Plan
    ) -> bool:
        """Preempt others, if that lets a waiting request run and it may do so.

        Those are requests of a strictly worse priority; a beam whose search is under
        way may preempt whatever is less urgent, as the beams that run may.

        Args:
            request: The waiting one.
            start: Where it starts: blocks that it shares with victims are no gain.
            shortfall: Blocks that it lacks; 0 or less: it lacks a row.
            plan: The victims leave it.

        Returns:
            Whether it has room now; if not, nothing changed.
        """
        if _is_under_way(request):
            candidates = self._candidates(after=request.unit)
        elif self.policy == "priority":
            units = units_of(self._running)
            worse = [u for u in units if u[0].rank[0] > request.rank[0]]
            candidates = self.preemption.by_work_lost(worse, self.block_tables)
        else:
            candidates = []

        def is_enough(units: Sequence[Sequence[Request]]) -> bool:
            members = [r for unit in units for r in unit if r.row is not None]
            gain = sum(map(self._blocks.num_to_come, members))
            gain += self._blocks.reclaimable(units, less=start.shared)
            return gain >= shortfall

        victims = choose_victims(candidates, is_enough)
        for unit in victims:
            self._preempt(unit, plan)
        self._running = [r for r in self._running if r.row is not None]
        return bool(victims)

    def _admit(
        self, request: Request, start: Start, num_tokens: int, plan: Plan
    ) -> None:
        """Let a waiting request run: blocks it shares, and its next tokens."""
        self._waiting.remove(request)
        request.row = heapq.heappop(self._free_rows)
        self._num_admissions += 1
        request.admission = self._num_admissions
        bisect.insort(self._running, request, key=_by_rank)
        self._blocks.begin(request, start, num_tokens, plan)

    def branch(
        self, beams: Sequence[Request], branches: Sequence[tuple[int, int]]
    ) -> list[Request]:
        """Let the beams of a search go on, each of which has computed all its tokens.

        Call it between `commit` and `schedule`.

        Args:
            beams: All of the search's that run.
            branches: (index in `beams` of the one it continues, next token) for each
                of those to come; none: the search ends.

        Returns:
            The request of each branch.
        """
        group = beams[0].unit
        continued = {beams[parent] for parent, _ in branches}
        idle = [request for request in group if request not in continued]
        for request in idle:
            if request.row is not None:
                self._vacate(request)
                del self._requests[request.request_id]
        self._running = [r for r in self._running if r.row is not None]
        next_beams: list[Request] = []
        for parent, token_id in branches:
            request = beams[parent]
            if request not in continued:  # another one has its place already
                request = idle.pop(0)
                request.fork(beams[parent], [*beams[parent].token_ids, token_id])
                self._requests[request.request_id] = request
                bisect.insort(self._waiting, request, key=_by_rank)
            continued.discard(request)
            next_beams.append(request)
        for request, (parent, token_id) in zip(next_beams, branches, strict=True):
            if request is beams[parent]:
                request.token_ids.append(token_id)
        if not branches:
            for request in group:
                request.finish_reason = "stop"
        return next_beams

    def _retire(self, requests: list[Request]) -> None:
        """Let running requests that have ended go."""
        for request in requests:
            self._vacate(request)
            self._blocks.drop_swapped(request)
            del self._requests[request.request_id]
        self._running = [r for r in self._running if r.row is not None]

    def _vacate(self, request: Request) -> None:
        """Give back a running request's blocks and its row."""
        self._blocks.give_back(request)
        assert request.row is not None, f"{request!r} has no row to give back"
        heapq.heappush(self._free_rows, request.row)
        request.row = None

    def check_invariants(self) -> None:
        """Assert that queues, rows, counters and blocks agree, between any calls."""
        running, waiting = self._running, list(self._waiting)
        self._blocks.check_invariants(running, waiting)
        every = {request.request_id: request for request in running + waiting}
        assert every == self._requests, f"{every} against {self._requests}"
        assert len(every) == len(running) + len(waiting), "a request is queued twice"
        for queue in (running, waiting):
            assert sorted(queue, key=_by_rank) == queue, f"out of order: {queue}"
        rows = [request.row for request in running if request.row is not None]
        assert len(rows) == len(running), f"running without a row: {running}"
        assert len(set(rows)) == len(rows), f"rows taken twice: {rows}"
        assert not set(rows) & set(self._free_rows), f"free and taken: {rows}"
        for request in waiting:
            assert request.row is None, f"waiting with a row: {request!r}"
            assert request.num_scheduled_tokens == 0, f"waiting: {request!r}"
            assert request.num_pending_tokens == 0, f"waiting: {request!r}"
        for request in every.values():
            assert request.finish_reason is None, f"ended but queued: {request!r}"


def _is_under_way(request: Request) -> bool:
    """Whether it is a beam, and others of its search run."""
    return any(beam.row is not None for beam in request.beams or ())
