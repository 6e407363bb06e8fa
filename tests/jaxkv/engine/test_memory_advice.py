import ctypes
import errno
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Engine, EngineConfig
from jaxkv.engine import memory_advice
from jaxkv.engine.memory_advice import start_collapsing
from jaxkv.testing import tiny_llama

UNIT = 2 << 20


def random_array(size, seed=0):
    """An array of `size` bytes."""
    return jnp.asarray(
        np.random.default_rng(seed).integers(0, 256, size, np.uint8), "uint8"
    )


def collapse_memory(arrays):
    """Move arrays into huge pages, and wait; return the bytes moved."""
    return memory_advice._collapse(memory_advice._memory_of(arrays))


class RecordingLibc:
    """Answers every call alike, and remembers what it was asked for."""

    def __init__(self, error=0):
        self.error, self.calls = error, []

    def madvise(self, address, size, advice):
        self.calls.append((address.value, size.value, advice))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


@pytest.fixture
def libc(monkeypatch):
    libc = RecordingLibc()
    monkeypatch.setattr(memory_advice, "_libc", libc)
    return libc


def test_large_arrays_move_and_keep_their_content():
    arrays = [random_array(size, size) for size in (9 << 20, 3 << 20, 300 << 10, 10)]
    before = [np.array(array) for array in arrays]
    moved = collapse_memory(arrays)
    for array, content in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, content)
    if moved == 0:
        pytest.skip("this system has no huge pages to give")
    assert moved % UNIT == 0
    assert 8 << 20 <= moved <= 20 << 20
    jax.jit(lambda *arrays: [a + 1 for a in arrays])(*arrays)


def test_huge_pages_that_hold_an_array_are_asked_for_once(libc):
    arrays = [random_array(size, size) for size in (9 << 20, 3 << 20, 1 << 20, 1 << 20)]
    total = collapse_memory([*arrays, arrays[0]])
    assert {(size, advice) for _, size, advice in libc.calls} == {(UNIT, 25)}
    wanted = set()
    for array in arrays:
        first = array.unsafe_buffer_pointer() // UNIT
        last = (array.unsafe_buffer_pointer() + array.nbytes - 1) // UNIT
        wanted.update(i * UNIT for i in range(first, last + 1))
    assert [address for address, _, _ in libc.calls] == sorted(wanted)
    assert total == UNIT * len(wanted)


def test_small_arrays_are_left_alone(libc):
    assert collapse_memory([random_array((256 << 10) - 1), jnp.zeros(3)]) == 0
    assert collapse_memory([]) == 0
    assert libc.calls == []
    assert collapse_memory([random_array(256 << 10)]) > 0


def test_arrays_of_other_devices_are_left_alone(libc):
    data = types.SimpleNamespace(nbytes=8 << 20, unsafe_buffer_pointer=lambda: 0)
    shard = types.SimpleNamespace(
        data=data, device=types.SimpleNamespace(platform="gpu")
    )
    assert collapse_memory([types.SimpleNamespace(addressable_shards=[shard])]) == 0
    assert libc.calls == []


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOSYS])
def test_a_system_that_cannot_is_asked_once(libc, error, monkeypatch):
    libc.error = error
    assert collapse_memory([random_array(9 << 20)]) == 0
    assert len(libc.calls) == 1


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN, errno.EBUSY])
def test_one_page_that_cannot_move_does_not_keep_back_the_others(libc, error):
    libc.error = error
    array = random_array(9 << 20)
    assert collapse_memory([array]) == 0
    assert len(libc.calls) >= 5


def test_other_systems_do_nothing(monkeypatch):
    monkeypatch.setattr(memory_advice, "_libc", None)
    assert collapse_memory([random_array(9 << 20)]) == 0


def test_steps_may_run_and_arrays_go_while_they_move():
    gone = random_array(64 << 20)
    kept = random_array(64 << 20, 1)
    before = np.array(kept)
    thread = start_collapsing([gone, kept])
    gone.delete()
    add = jax.jit(lambda array: array + jnp.uint8(1), donate_argnums=0)
    for _ in range(256):
        kept = add(kept)
    thread.join()
    np.testing.assert_array_equal(kept, before)


def test_it_does_not_wait_nor_hold_up_the_end_of_the_process(libc, monkeypatch):
    asked, may_go_on = threading.Event(), threading.Event()

    def madvise(address, size, advice):
        asked.set()
        assert may_go_on.wait(60)
        return 0

    monkeypatch.setattr(libc, "madvise", madvise)
    thread = start_collapsing([random_array(9 << 20)])
    assert asked.wait(60)
    assert thread.is_alive()
    assert thread.daemon
    may_go_on.set()
    thread.join()


def test_an_engine_moves_its_parameters_and_its_cache(libc):
    params, config = tiny_llama(hidden_size=256, vocab_size=1024)
    engine = Engine.from_params(
        params, config, EngineConfig(num_blocks=256, max_num_seqs=2, warmup="lazy")
    )
    for thread in threading.enumerate():
        if thread.name == "huge pages":
            thread.join()
    asked = {address for address, _, _ in libc.calls}
    runner = engine._runner
    for array in jax.tree.leaves((runner._params, runner._cache)):
        if array.nbytes >= 256 << 10:
            assert array.unsafe_buffer_pointer() // UNIT * UNIT in asked
