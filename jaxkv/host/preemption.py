"""Who loses its blocks when the pool runs out.

A victim always comes after the request it makes room for in the order of urgency
(`Request.rank`), so two requests never preempt each other back and forth. What counts
is the blocks that only the victim holds: giving back a shared block frees nothing. A
victim's K and V are dropped and recomputed, as far as the prefix cache has them not.
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
        running: Requests that may hold blocks, in order of urgency.
        requester: The one of them that lacks blocks.
        shortfall: Blocks that must become free; at least 1.
        reclaimable: How many blocks only the given request holds.

    Returns:
        Requests less urgent than `requester`, the least urgent first, none of which can
        be left out. If they all together would not do, `[requester]` alone: it gives
        way, and nobody loses blocks for nothing.
    """
    gains: list[tuple[Request, int]] = []
    total = 0
    for request in reversed(running):
        if request.rank <= requester.rank or total >= shortfall:
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
