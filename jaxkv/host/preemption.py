"""Who loses its blocks when the pool runs out.

Under FCFS the request that arrived later is the less urgent one. A victim always
arrived after the request it makes room for, so two requests never preempt each other
back and forth. What counts is the blocks that only the victim holds: giving back a
shared block frees nothing. A victim's K and V are dropped and recomputed.
"""

from collections.abc import Callable, Sequence

from jaxkv.host.request import Request


def choose_victims(
    running: Sequence[Request],
    requester: Request,
    shortfall: int,
    reclaimable: Callable[[Request], int],
) -> list[Request]:
    """Choose whom to preempt so that `requester` gets the blocks it lacks.

    Args:
        running: Requests that may hold blocks, in order of arrival.
        requester: The one of them that lacks blocks.
        shortfall: Blocks that must become free; at least 1.
        reclaimable: How many blocks only the given request holds.

    Returns:
        Requests that arrived after `requester`, the latest first, none of which can
        be left out. If they all together would not do, `[requester]` alone: it gives
        way, and nobody loses blocks for nothing.
    """
    gains: list[tuple[Request, int]] = []
    total = 0
    for request in reversed(running):
        if request.arrival <= requester.arrival or total >= shortfall:
            break
        gain = reclaimable(request)
        if gain > 0:
            gains.append((request, gain))
            total += gain
    if total < shortfall:
        return [requester]
    victims: list[Request] = []
    for request, gain in gains:
        if total - gain >= shortfall:
            total -= gain
        else:
            victims.append(request)
    return victims
