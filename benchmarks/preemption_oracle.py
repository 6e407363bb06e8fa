"""What the truly cheaper way back would have been, at each preemption.

Before a step that may preempt, the simulation is forked, and each victim's two ways
are tried: both forks run until every victim of the step is where it was again, all of
its tokens' K and V there, or has ended. Either way's *cost* is what the step's victims
lost from that step on (`Simulation.lost`): the time of the transfers that took place,
and of the tokens that were computed again. So what the prefix cache gave, how the
tokens fell into steps, and whether what was swapped out was of use, is as it turns
out and not as estimated. The cheaper way is taken, recompute if they cost the same.

Everything else is held: whom to preempt is chosen by the estimate, as always
(`Decided.work_lost`), and in a fork later preemptions are decided by the estimate.

Its limits: it is greedy, one victim after the other. A way that costs others' cached
blocks, or makes others wait, does not pay for that, and neither does a step that the
victim need not take part in; the seconds of whole runs show such effects. So an oracle
need not have the shortest run.
"""

from collections import deque
from dataclasses import dataclass, field

from benchmarks.simulation import Simulation
from jaxkv.host.preemption import Preemption


@dataclass(frozen=True, kw_only=True)
class Decided(Preemption):
    """The cost-based choice, but for decisions that are made already.

    Attributes:
        ways: Whether to swap the next victims; those after them: as `always` says.
        always: None: as estimated.
        asked: How often it was asked, as one number in a list.
    """

    ways: deque[bool] = field(default_factory=deque)
    always: bool | None = None
    asked: list[int] = field(default_factory=lambda: [0])

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to swap, by decision or else by estimate."""
        self.asked[0] += 1
        if self.ways:
            return self.ways.popleft()
        if self.always is not None:
            return self.always
        return super().swaps(num_blocks, num_tokens)

    def work_lost(self, num_blocks: int, num_tokens: int) -> float:
        """Return the estimate's seconds, whatever is decided."""
        return min(self.swap_seconds(num_blocks), self.recompute_seconds(num_tokens))


@dataclass
class Regret:
    """What victims lost by the estimate's ways and by the oracle's, state by state.

    Attributes:
        steps: That preempted.
        differing: Those in which another way was truly cheaper.
        estimated: Seconds lost by the ways that the estimate chose.
        cheapest: Seconds lost by the oracle's.
    """

    steps: int = 0
    differing: int = 0
    estimated: float = 0.0
    cheapest: float = 0.0


def run_with_oracle(simulation: Simulation, *, follow: bool) -> Regret:
    """Run to the end, asking the oracle at every preemption.

    Args:
        simulation: Its scheduler's `preemption` is a `Decided` that estimates.
        follow: Take the oracle's ways; if not, it only watches.

    Returns:
        Its findings on the way.
    """
    regret = Regret()
    while not simulation.has_ended:
        simulation.arrive()
        if may_preempt(simulation):
            ways = _ask(simulation, regret)
            if follow:
                _decided(simulation).ways.extend(ways)
        simulation.step()
        assert not _decided(simulation).ways, "a decision was not asked for"
    return regret


def may_preempt(simulation: Simulation) -> bool:
    """Whether the next step may run out of blocks; if not, it does not preempt."""
    scheduler = simulation.scheduler
    needed = 0
    for request in simulation.unfinished.values():
        if request.row is not None:
            known, done = len(request.token_ids), request.num_scheduled_tokens
            end = min(known, done + scheduler.max_num_batched_tokens)
            needed += scheduler.block_tables.blocks_needed(request.request_id, end)
    return needed > scheduler.pool.num_available


def _ask(simulation: Simulation, regret: Regret) -> list[bool]:
    """Return the truly cheaper ways of the next step's victims."""
    probe = simulation.fork()
    before = _decided(probe).asked[0]
    probe.step()
    num_decisions = _decided(probe).asked[0] - before
    if num_decisions == 0:
        return []
    estimated = cost(simulation, [])
    ways: list[bool] = []
    cheapest = estimated
    for _ in range(num_decisions):
        swap, recompute = (cost(simulation, [*ways, way]) for way in (True, False))
        ways.append(swap < recompute)
        cheapest = min(swap, recompute)
    regret.steps += 1
    regret.differing += cheapest < estimated
    regret.estimated += estimated
    regret.cheapest += cheapest
    return ways


def cost(simulation: Simulation, ways: list[bool]) -> float:
    """Return the seconds that the next step's victims lose if they go these ways."""
    fork = simulation.fork()
    _decided(fork).ways.extend(ways)
    requests = dict(fork.unfinished)
    before = {name: r.num_preemptions for name, r in requests.items()}
    reached, lost = dict(fork.reached), dict(fork.lost)
    fork.step()
    away = {name for name, r in requests.items() if r.num_preemptions > before[name]}
    victims = list(away)
    while away:
        fork.step()
        away = {
            name
            for name in away
            if name in fork.unfinished
            and requests[name].num_computed_tokens < reached[name]
        }
    return sum(fork.lost[name] - lost[name] for name in victims)


def _decided(simulation: Simulation) -> Decided:
    preemption = simulation.scheduler.preemption
    assert isinstance(preemption, Decided), f"not to be decided: {preemption!r}"
    return preemption
