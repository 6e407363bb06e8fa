import pytest

from jaxkv.host.preemption import choose_victims
from jaxkv.host.request import Request, SamplingParams


def make_running(count):
    running = []
    for arrival in range(count):
        request = Request(f"r{arrival}", [1], SamplingParams(), max_total_tokens=9)
        request.arrival = arrival
        request.rank = (0, arrival)
        running.append(request)
    return running


def victims(gains, requester, shortfall):
    """Arrivals of the victims where request i would give back gains[i] blocks."""
    running = make_running(len(gains))
    chosen = choose_victims(
        running, running[requester], shortfall, lambda r: gains[r.arrival]
    )
    return [request.arrival for request in chosen]


@pytest.mark.parametrize(
    ("gains", "requester", "shortfall", "expected"),
    [
        pytest.param([1, 1, 1], 0, 1, [2], id="the latest goes first"),
        pytest.param([1, 1, 1], 0, 2, [2, 1], id="as many as needed"),
        pytest.param([1, 1, 0], 0, 1, [1], id="no blocks of its own: no victim"),
        pytest.param([1, 3, 1], 0, 3, [1], id="no more victims than useful"),
        pytest.param([1, 3, 1], 0, 4, [2, 1], id="both are needed"),
        pytest.param([9, 1, 1], 1, 1, [2], id="only who arrived later"),
        pytest.param([9, 9, 1], 2, 1, [2], id="the latest gives way itself"),
        pytest.param([9, 1, 1], 1, 2, [1], id="nobody loses blocks for nothing"),
        pytest.param([4], 0, 1, [0], id="alone"),
    ],
)
def test_choice_of_victims(gains, requester, shortfall, expected):
    assert victims(gains, requester, shortfall) == expected


def test_a_victim_is_not_counted_when_it_need_not_be():
    running = make_running(50)
    asked = []

    def reclaimable(request):
        asked.append(request.arrival)
        return 1

    choose_victims(running, running[0], 2, reclaimable)
    assert asked == [49, 48]
