"""A trace against the real scheduler, in virtual time: `Simulation`.

The scheduler decides, as in an engine; a step takes what `StepTime` says and samples
what the trace says. A request arrives when its time has come, and where nobody runs
the clock jumps to the next. The scheduler is not told how long an answer gets: it ends
by a stop token, as most do.

*Lost* is what preemption made necessary: the time to compute tokens that had been
computed before, and to move blocks. A step's share of it is what it took less what it
would have taken without those tokens.
"""

import copy
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.request_traces import TracedRequest
from benchmarks.step_time import StepTime
from jaxkv.config import NULL_BLOCK
from jaxkv.host.request import Request, SamplingParams, max_total_tokens
from jaxkv.host.schedule import Schedule
from jaxkv.host.scheduler import Scheduler

END = 2**32 - 1
"""The last token of every answer."""


class Simulation:
    """One run of a trace; it can be forked at any step.

    Attributes:
        scheduler: The real one.
        clock: Seconds since the trace's begin.
        unfinished: The scheduler's requests by id; a request's id is its place in the
            trace.
        reached: The most tokens that each of them had computed.
        lost: Seconds that each request, also an ended one, lost by preemption.
        num_recomputed: Tokens computed again.
        num_moved_out: Blocks moved to host memory.
        num_moved_in: Blocks moved back.
    """

    def __init__(
        self, trace: Sequence[TracedRequest], time: StepTime, scheduler: Scheduler
    ):
        """Begin a run of a trace, which is in the order of arrival.

        Raises:
            ValueError: A request does not fit into the scheduler's pool.
        """
        self.trace = trace
        self.time = time
        self.scheduler = scheduler
        self.clock = 0.0
        self.unfinished: dict[str, Request] = {}
        self.reached: dict[str, int] = {}
        self.lost: dict[str, float] = {}
        self.first_token: dict[str, float] = {}  # when it came
        self.num_recomputed = 0
        self.num_moved_out = 0
        self.num_moved_in = 0
        self.num_swapped = 0  # times that a victim came back from host memory
        self.num_steps = 0
        self.num_computed = 0  # tokens
        self._limit = 0  # of any request's tokens
        pool = scheduler.pool
        for request in trace:
            self._limit = max_total_tokens(
                len(request.prompt) + len(request.output) - 1,
                None,
                max_model_len=2**31,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
            )
        self._num_arrived = 0

    def fork(self) -> "Simulation":
        """Return one that goes on from here on its own."""
        memo: dict[int, Any] = {}
        for shared in (self.trace, self.time):
            memo[id(shared)] = shared
        for request in self.unfinished.values():
            # Long lists, and deepcopy would look at every element.
            for shared in (request.prompt_token_ids, request.sampling_params):
                memo[id(shared)] = shared
            memo[id(request.token_ids)] = list(request.token_ids)
            for part in reversed(list(request.swapped or ())):
                copy.deepcopy(part, memo)  # the deepest first, so that none recurses
            if request.chain is not None:
                memo[id(request.chain.digests)] = list(request.chain.digests)
        return copy.deepcopy(self, memo)

    @property
    def has_ended(self) -> bool:
        """Whether all of the trace is done."""
        return self._num_arrived == len(self.trace) and not self.unfinished

    def run(self) -> None:
        """Go on to the end of the trace."""
        while not self.has_ended:
            self.step()

    def arrive(self) -> None:
        """Add the requests whose time has come; if nobody is there, wait for one."""
        if not self.unfinished:
            self.clock = max(self.clock, self.trace[self._num_arrived].arrival)
        while (
            self._num_arrived < len(self.trace)
            and self.trace[self._num_arrived].arrival <= self.clock
        ):
            traced = self.trace[self._num_arrived]
            request = Request(
                str(self._num_arrived),
                traced.prompt,
                SamplingParams(max_tokens=None, temperature=0.0, stop_token_ids=[END]),
                max_total_tokens=self._limit,
            )
            self.scheduler.add(request)
            self.unfinished[request.request_id] = request
            self.reached[request.request_id] = 0
            self.lost[request.request_id] = 0.0
            self._num_arrived += 1

    def step(self) -> None:
        """Run one step, which must not be called at the end."""
        self.arrive()
        schedule = self.scheduler.schedule()
        num_moved = self._move(schedule)
        rows = [(row.start, row.num_tokens) for row in schedule.rows]
        self.clock += self.time.step(rows, num_moved * self.scheduler.pool.block_size)
        self._count_recomputed(schedule)
        sampled = [
            self._output(row.request) if row.num_samples else None
            for row in schedule.rows
        ]
        for request in self.scheduler.commit(schedule, sampled):
            self.first_token.setdefault(request.request_id, self.clock)
            if request.finish_reason is not None:
                del self.unfinished[request.request_id]
                del self.reached[request.request_id]
        for row in schedule.rows:
            name = row.request.request_id
            if name in self.unfinished:
                computed = row.request.num_computed_tokens
                self.reached[name] = max(self.reached[name], computed)
        self.num_steps += 1
        self.num_computed += schedule.num_tokens

    def _output(self, request: Request) -> int:
        output = self.trace[int(request.request_id)].output
        place = len(request.token_ids) - request.num_prompt_tokens
        return output[place] if place < len(output) - 1 else END

    def _move(self, schedule: Schedule) -> int:
        """Carry out swaps; return how many blocks moved."""
        if not (schedule.swap_outs or schedule.swap_ins):
            return 0
        owners = {
            id(part): name
            for name, request in self.unfinished.items()
            for part in request.swapped or ()
        }
        num_moved = {"out": 0, "in": 0}
        for way, swaps in (("out", schedule.swap_outs), ("in", schedule.swap_ins)):
            for swap in swaps:
                num_blocks = sum(block != NULL_BLOCK for block in swap.block_ids)
                num_moved[way] += num_blocks
                seconds = self.time.move(num_blocks * self.scheduler.pool.block_size)
                self.lost[owners[id(swap.swapped)]] += seconds
                swap.swapped.content = True
        self.num_swapped += len({owners[id(s.swapped)] for s in schedule.swap_ins})
        self.num_moved_out += num_moved["out"]
        self.num_moved_in += num_moved["in"]
        return sum(num_moved.values())

    def _count_recomputed(self, schedule: Schedule) -> None:
        again = []  # name, seconds
        is_anything_new = False
        for row in schedule.rows:
            name, end = row.request.request_id, row.start + row.num_tokens
            count = max(0, min(self.reached[name], end) - row.start)
            is_anything_new |= count < row.num_tokens
            if count:
                seconds = self.time.row(row.start, row.num_tokens)
                seconds -= self.time.row(row.start + count, row.num_tokens - count)
                again.append((name, seconds))
                self.num_recomputed += count
        for name, seconds in again:
            fixed = 0.0 if is_anything_new else self.time.fixed / len(again)
            self.lost[name] += seconds + fixed

    def result(self) -> dict[str, Any]:
        """Return the figures of a run that has ended."""
        cache = self.scheduler.prefix_cache
        waits = [
            1e3 * (self.first_token[str(place)] - request.arrival)
            for place, request in enumerate(self.trace)
        ]
        num_prompt = sum(len(request.prompt) for request in self.trace)
        num_output = sum(len(request.output) for request in self.trace)
        block_bytes = self.time.kv_bytes * self.scheduler.pool.block_size
        return {
            "requests": len(self.trace),
            "prompt_tokens": num_prompt,
            "output_tokens": num_output,
            "seconds": round(self.clock, 3),
            "output_tokens_per_s": round(num_output / self.clock, 1),
            "total_tokens_per_s": round((num_prompt + num_output) / self.clock, 1),
            "ttft_ms_median": round(statistics.median(waits), 1),
            "ttft_ms_p99": round(percentile(waits, 99), 1),
            "steps": self.num_steps,
            "prefix_hit_percent": round(100 * cache.num_hits / cache.num_queries, 1)
            if cache.num_queries
            else 0.0,
            "preemptions": self.scheduler.num_preemptions,
            "swaps": self.num_swapped,
            "recomputed_tokens": self.num_recomputed,
            "moved_out_gb": round(self.num_moved_out * block_bytes / 1e9, 3),
            "moved_in_gb": round(self.num_moved_in * block_bytes / 1e9, 3),
            "lost_seconds": round(sum(self.lost.values()), 4),
        }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
