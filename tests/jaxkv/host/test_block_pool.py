import gc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxkv.config import NULL_BLOCK
from jaxkv.host.block_hash import block_hashes
from jaxkv.host.block_pool import BlockPool


def state(pool):
    """Everything that can be seen of a pool, with the exact orders of reuse."""
    pool.check_invariants()
    counts = [pool.ref_count(i) for i in range(pool.num_blocks)]
    return list(pool._free), list(pool._cached), counts, dict(pool._index)


def published(pool, tokens):
    """Allocate and publish the blocks of a prompt, as a request would."""
    digests = block_hashes(tokens, pool.block_size)
    ids = pool.allocate(len(digests))
    for block_id, digest in zip(ids, digests, strict=True):
        pool.publish(block_id, digest)
    return ids, digests


def test_a_fresh_pool_hands_out_1_2_3():
    pool = BlockPool(5, 4)
    assert pool.allocate(1) == [1]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.allocate(1) is None


def test_released_blocks_are_reused_oldest_first_and_each_chain_deepest_first():
    pool = BlockPool(8, 4)
    assert pool.allocate(7) == [1, 2, 3, 4, 5, 6, 7]
    pool.release([4, 5])
    pool.release([1, 2, 3])
    pool.release([7])
    assert pool.allocate(6) == [5, 4, 3, 2, 1, 7]


def test_free_blocks_keep_their_order_however_often_they_go_round():
    pool = BlockPool(8, 4)
    order = [1, 2, 3, 4, 5, 6, 7]
    for n in (3, 7, 1, 0, 5, 6, 2, 4, 7, 7, 3) * 5:
        taken, order = order[:n], order[n:]
        assert pool.allocate(n) == taken
        assert list(pool._free) == order
        pool.release(taken)
        order += taken[::-1]
        assert list(pool._free) == order
    pool.check_invariants()


def test_the_garbage_collector_visits_no_more_in_a_larger_pool():
    def num_visited(num_blocks):
        pool = BlockPool(num_blocks, 4)
        parts = [*vars(pool).values(), *vars(pool._free).values()]
        return sum(len(gc.get_referents(part)) for part in parts)

    assert num_visited(10_000) == num_visited(10)


def test_b02_an_allocation_that_fails_changes_nothing():
    pool = BlockPool(7, 4)
    published(pool, range(8))
    pool.release([1, 2])
    pool.allocate(2)
    before = state(pool)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 2, 2)
    assert pool.allocate(5) is None
    assert state(pool) == before
    assert pool.allocate(4) == [5, 6, 2, 1]


def test_b06_shared_blocks_count_once():
    pool = BlockPool(9, 4)
    first, digests = published(pool, range(8))
    second = pool.allocate(2)  # the same prompt, computed at the same time
    for block_id, digest in zip(second, digests, strict=True):
        pool.publish(block_id, digest)
    assert pool.lookup(digests) == first == [1, 2]
    pool.release(first)
    pool.release(second)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (6, 2, 0)
    pool.share([1])  # one that shares half
    pool.share([1])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (6, 1, 1)
    pool.release([1, 1])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (6, 2, 0)
    pool.check_invariants()


def test_b08_an_evicted_block_is_not_found_again():
    evicted = []
    pool = BlockPool(4, 4, on_evict=lambda *args: evicted.append(args))
    ids, digests = published(pool, range(4))
    pool.release(ids)
    assert pool.lookup(digests) == [1]
    assert pool.allocate(2) == [2, 3]
    assert evicted == []
    assert pool.allocate(1) == [1]
    assert evicted == [(1, digests[0])]
    assert pool.lookup(digests) == []


def test_on_evict_finds_the_block_gone_from_the_index_and_taken():
    seen = []

    def on_evict(block_id, digest):
        seen.append((pool.lookup([digest]), pool.ref_count(block_id)))

    pool = BlockPool(3, 4, on_evict=on_evict)
    ids, _ = published(pool, range(8))
    pool.release(ids)
    assert pool.allocate(2) == [2, 1]
    assert seen == [([], 1), ([], 1)]


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 8])
def test_b10_references_are_taken_on_allocation(num_tokens):
    pool = BlockPool(4, 4)
    ids = pool.allocate(-(-num_tokens // 4))
    assert [pool.ref_count(i) for i in ids] == [1] * len(ids)
    pool.release(ids)
    assert [pool.ref_count(i) for i in ids] == [0] * len(ids)
    assert pool.num_free == 3
    assert state(pool)[0][3 - len(ids) :] == ids[::-1]


def test_b12_a_hundred_short_requests_leave_the_pool_at_its_baseline():
    pool = BlockPool(6, 4)
    for number in range(100):
        ids, _ = published(pool, range(4 * number, 4 * number + 8))
        assert (pool.num_held, pool.num_free + pool.num_cached) == (2, 3)
        pool.release(ids)
        assert (pool.num_held, pool.num_free + pool.num_cached) == (0, 5)
        pool.check_invariants()
    assert len(pool.allocate(5)) == 5


def test_b23_a_chain_loses_its_deepest_block_first():
    for _ in range(100):
        pool = BlockPool(4, 4)
        ids, digests = published(pool, range(12))
        assert ids == [1, 2, 3]
        pool.release(ids)
        assert pool.allocate(1) == [3]
        assert pool.lookup(digests) == [1, 2]


def test_unhashed_blocks_are_reused_before_hashed_ones():
    pool = BlockPool(4, 4)
    ids, _ = published(pool, range(4))
    pool.release(ids)
    other = pool.allocate(2)
    pool.release(other)
    assert pool.allocate(3) == [3, 2, 1]


def test_cached_blocks_are_evicted_least_recently_used_first():
    pool = BlockPool(4, 4)
    for start in (0, 10, 20):
        published(pool, range(start, start + 4))
    for block_id in (1, 2, 3):
        pool.release([block_id])
    pool.share([1])
    pool.release([1])
    assert pool.allocate(3) == [2, 3, 1]


def test_lookup_changes_no_order_and_takes_no_reference():
    pool = BlockPool(4, 4)
    _, one = published(pool, range(4))
    published(pool, range(10, 14))
    pool.release([1, 2])
    before = state(pool)
    assert pool.lookup(one) == [1]
    assert state(pool) == before


def test_lookup_ends_at_the_first_gap():
    pool = BlockPool(5, 4)
    digests = block_hashes(range(12), 4)
    ids = pool.allocate(3)
    pool.publish(ids[0], digests[0])
    pool.publish(ids[2], digests[2])
    assert pool.lookup(digests) == [1]
    assert pool.lookup(digests[2:]) == [3]
    assert pool.lookup([]) == []


def test_share_revives_a_cached_block():
    pool = BlockPool(3, 4)
    ids, _ = published(pool, range(4))
    pool.release(ids)
    pool.share([1, 1])
    assert (pool.ref_count(1), pool.num_cached) == (2, 0)
    assert pool.allocate(2) is None


def test_the_first_block_of_a_digest_keeps_it():
    pool = BlockPool(4, 4)
    pool.allocate(2)
    pool.publish(1, b"d")
    pool.publish(2, b"d")
    pool.publish(1, b"d")
    assert pool.lookup([b"d"]) == [1]
    pool.release([1, 2])
    assert (list(pool._free), list(pool._cached)) == ([3, 2], [1])


def test_publish_refuses_a_block_that_is_not_held_or_has_another_digest():
    pool = BlockPool(4, 4)
    pool.allocate(1)
    pool.publish(1, b"d")
    with pytest.raises(ValueError, match=r"block 1 is published as 64, .* as 65"):
        pool.publish(1, b"e")
    pool.release([1])
    before = state(pool)
    for block_id in (1, 2, NULL_BLOCK):
        with pytest.raises(ValueError, match=f"publish block {block_id}: it is not h"):
            pool.publish(block_id, b"d")
    assert state(pool) == before


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 3], "cannot release block 3 1 times: it has 0 references"),
        ([1, 1], "cannot release block 1 2 times: it has 1 references"),
        ([2, 2, 2], "cannot release block 2 3 times: it has 2 references"),
        ([1, NULL_BLOCK], "cannot release block 0 1 times"),
        ([1, 5], "block 5 is outside the pool of 5 blocks"),
        ([1, -1], "block -1 is outside the pool of 5 blocks"),
    ],
)
def test_release_is_all_or_nothing(ids, message):
    pool = BlockPool(5, 4)
    pool.allocate(2)
    pool.share([2])
    before = state(pool)
    with pytest.raises(ValueError, match=message):
        pool.release(ids)
    assert state(pool) == before


@pytest.mark.parametrize("other", [3, NULL_BLOCK, 5, -1])
def test_share_is_all_or_nothing(other):
    pool = BlockPool(5, 4)
    pool.allocate(2)
    pool.publish(2, b"d")
    pool.release([2])
    before = state(pool)
    with pytest.raises(ValueError, match=f"block {other} is"):
        pool.share([1, 2, other])
    assert state(pool) == before


def test_reset_forgets_digests_and_frees_cached_blocks_in_their_order():
    pool = BlockPool(6, 4)
    _, digests = published(pool, range(12))
    pool.release([2, 3])
    pool.reset()
    assert state(pool) == ([4, 5, 3, 2], [], [0, 1, 0, 0, 0, 0], {})
    pool.publish(1, b"another")
    assert pool.lookup(digests) == []
    assert pool.lookup([b"another"]) == [1]


def test_without_prefix_caching_nothing_is_published():
    pool = BlockPool(3, 4, enable_prefix_caching=False)
    pool.allocate(1)
    pool.publish(1, b"d")
    pool.release([1])
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert pool.lookup([b"d"]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BlockPool(1, 4), "num_blocks must be at least 2 .* got 1"),
        (lambda: BlockPool(2, 0), "block_size must be a positive integer, got 0"),
        (lambda: BlockPool(2, 4).allocate(-1), "cannot allocate -1 blocks"),
        (lambda: BlockPool(2, 4).ref_count(2), "block 2 is outside the pool of 2"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_root_is_kept_for_those_who_hash():
    assert BlockPool(2, 4).root == b""
    assert BlockPool(2, 4, root=b"r").root == b"r"


def test_check_invariants_sees_a_lost_and_a_doubled_block():
    pool = BlockPool(4, 4)
    pool._ref_counts[2] = 1
    with pytest.raises(AssertionError):
        pool.check_invariants()
    pool = BlockPool(4, 4)
    assert pool.allocate(1) == [1]
    pool._free.append(3)
    with pytest.raises(AssertionError):
        pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """A pool against the plainest model of it: lists, searched from end to end."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.evicted = []
        self.pool = BlockPool(
            num_blocks, 4, on_evict=lambda *args: self.evicted.append(args)
        )
        self.free = list(range(1, num_blocks))
        self.cached = []
        self.held = []  # one entry a reference
        self.digests = {}

    @rule(n=st.integers(0, 5))
    def allocate(self, n):
        self.evicted.clear()
        order = self.free + self.cached
        taken = self.pool.allocate(n)
        if n > len(order):
            assert taken is None
            return
        assert taken == order[:n]
        gone = [i for i in taken if i in self.cached]
        assert self.evicted == [(i, self.digests.pop(i)) for i in gone]
        self.free = [i for i in self.free if i not in taken]
        self.cached = [i for i in self.cached if i not in taken]
        self.held += taken

    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.lists(st.integers(0, 9), max_size=3))
        if all(i in self.held or i in self.cached for i in ids):
            self.pool.share(ids)
            self.held += ids
            self.cached = [i for i in self.cached if i not in ids]
        else:
            with pytest.raises(ValueError, match="block"):
                self.pool.share(ids)

    @rule(data=st.data(), stray=st.lists(st.integers(0, 9), max_size=1))
    def release(self, data, stray):
        ids = data.draw(st.permutations(self.held))
        ids = ids[: data.draw(st.integers(0, 4))] + stray
        if any(ids.count(i) > self.held.count(i) for i in ids):
            with pytest.raises(ValueError, match="block"):
                self.pool.release(ids)
            return
        self.pool.release(ids)
        for i in reversed(ids):
            self.held.remove(i)
            if i not in self.held:
                (self.cached if i in self.digests else self.free).append(i)

    @rule(block_id=st.integers(0, 9), digest=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, block_id, digest):
        if block_id not in self.held or self.digests.get(block_id, digest) != digest:
            with pytest.raises(ValueError, match="block"):
                self.pool.publish(block_id, digest)
            return
        self.pool.publish(block_id, digest)
        if digest not in self.digests.values():
            self.digests[block_id] = digest

    @rule(digests=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3))
    def lookup(self, digests):
        owner = {digest: i for i, digest in self.digests.items()}
        known = [owner.get(digest) for digest in digests]
        length = known.index(None) if None in known else len(known)
        assert self.pool.lookup(digests) == known[:length]

    @invariant()
    def agrees(self):
        self.pool.check_invariants()
        sizes = (self.pool.num_free, self.pool.num_cached, self.pool.num_held)
        held = len(set(self.held))
        assert sizes == (len(self.free), len(self.cached), held)
        assert sum(sizes) == self.pool.num_blocks - 1
        for i in range(self.pool.num_blocks):
            assert self.pool.ref_count(i) == self.held.count(i)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)
