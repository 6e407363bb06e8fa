import pytest

from jaxkv import EngineConfig
from jaxkv.engine import sizing
from tests.helpers import cache_config


def choose(monkeypatch, free_bytes, **changes):
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: free_bytes)
    config = EngineConfig(max_num_seqs=4, **changes)
    return sizing.choose_num_blocks(cache_config(), config, max_model_len=10)


def test_on_a_cpu_requests_of_full_length_are_enough(monkeypatch):
    # 10 tokens are 3 blocks of 4; the null block comes on top.
    assert choose(monkeypatch, 2**40) == 4 * 3 + 1


def test_on_a_cpu_a_quarter_of_the_free_memory_is_the_limit(monkeypatch):
    per_block = cache_config().bytes_per_block
    assert choose(monkeypatch, 4 * 7 * per_block + 3) == 7


def test_no_room_is_an_error_with_the_numbers(monkeypatch):
    per_block = cache_config().bytes_per_block
    with pytest.raises(ValueError, match=f"no room .* takes {per_block}"):
        choose(monkeypatch, 4 * per_block)


def test_a_cache_larger_than_the_memory_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: 1000)
    total = cache_config().total_bytes
    with pytest.raises(ValueError, match=f"num_blocks 6 .* {total} bytes, but 1000"):
        sizing.check_fits(cache_config())


@pytest.mark.parametrize(
    ("swap_space", "message"),
    [
        (1e-12, "swap_space 1e-12 GiB is 0 bytes, but a block takes 100"),
        (2**-30 * 99, "swap_space .* is 99 bytes, but a block takes 100"),
        (2**-30 * 1001, "swap_space .* is 1001 bytes, but 1000 are available"),
    ],
)
def test_a_swap_space_that_holds_nothing_or_does_not_fit_is_refused(
    monkeypatch, swap_space, message
):
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=message):
        sizing.num_swap_blocks(EngineConfig(swap_space=swap_space), 100)


def test_a_swap_space_holds_whole_blocks(monkeypatch):
    monkeypatch.setattr(sizing, "_free_host_bytes", lambda: 1000)
    assert sizing.num_swap_blocks(EngineConfig(swap_space=2**-30 * 599), 100) == 5
    assert sizing.num_swap_blocks(EngineConfig(), 100) == 0
