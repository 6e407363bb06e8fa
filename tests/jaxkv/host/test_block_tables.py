import pytest

from jaxkv.host.block_pool import BlockPool
from jaxkv.host.block_tables import BlockTables


def make_tables(num_blocks=8, block_size=4):
    return BlockTables(BlockPool(num_blocks, block_size))


@pytest.mark.parametrize(
    ("num_tokens", "table", "in_last_block"),
    [
        (0, [], 0),
        (1, [1], 1),
        (4, [1], 4),
        (5, [1, 2], 1),
        (8, [1, 2], 4),
    ],
)
def test_b10_a_table_is_exactly_as_long_as_its_tokens_need(
    num_tokens, table, in_last_block
):
    tables = make_tables()
    assert tables.blocks_needed("a", num_tokens) == len(table)
    assert tables.grow("a", num_tokens)
    assert tables.blocks_needed("a", num_tokens) == 0
    assert tables.table("a") == table
    assert num_tokens - 4 * max(0, len(table) - 1) == in_last_block
    tables.check_invariants()
    tables.release("a")
    assert tables.pool.num_free == 7
    tables.check_invariants()


def test_tables_grow_token_by_token_and_interleave():
    tables = make_tables(block_size=2)
    for num_tokens in (1, 2, 3):
        assert tables.grow("a", num_tokens)
        assert tables.grow("b", num_tokens)
    assert (tables.table("a"), tables.table("b")) == ([1, 3], [2, 4])


def test_growing_to_fewer_tokens_changes_nothing():
    tables = make_tables()
    tables.grow("a", 8)
    assert tables.grow("a", 3)
    assert tables.table("a") == [1, 2]


def test_b02_growth_that_fails_changes_nothing():
    tables = make_tables(num_blocks=5)
    tables.grow("a", 4)
    for request_id in ("a", "b"):
        assert not tables.grow(request_id, 20)
        assert tables.table("a") == [1]
        assert tables.request_ids() == {"a"}
        assert list(tables.pool._free) == [2, 3, 4]
        tables.check_invariants()
    assert tables.grow("b", 12)
    assert tables.table("b") == [2, 3, 4]


def test_truncate_gives_back_the_blocks_past_the_tokens():
    tables = make_tables()
    tables.grow("a", 16)
    tables.truncate("a", 5)
    assert tables.table("a") == [1, 2]
    assert list(tables.pool._free) == [5, 6, 7, 4, 3]
    tables.truncate("a", 5)
    tables.truncate("a", 100)
    assert tables.table("a") == [1, 2]
    tables.check_invariants()


def test_truncating_to_nothing_leaves_the_request_unknown():
    tables = make_tables()
    tables.grow("a", 5)
    tables.truncate("a", 0)
    assert tables.request_ids() == set()
    tables.truncate("b", 3)
    tables.check_invariants()
    assert tables.pool.num_free == 7


def test_truncate_refuses_a_negative_length():
    with pytest.raises(ValueError, match="cannot truncate 'a' to -1 tokens"):
        make_tables().truncate("a", -1)


def test_b04_release_is_idempotent_and_the_deepest_block_goes_back_first():
    tables = make_tables(num_blocks=5)
    tables.grow("a", 12)
    for _ in range(2):
        tables.release("a")
        assert list(tables.pool._free) == [4, 3, 2, 1]
    tables.release("never seen")
    assert tables.table("a") == []
    tables.check_invariants()


def test_reclaimable_counts_the_blocks_nobody_else_holds():
    tables = make_tables()
    assert tables.reclaimable(["a"]) == 0
    tables.grow("a", 12)
    tables.pool.share([1, 2])
    assert tables.reclaimable(["a"]) == 1


def test_check_invariants_sees_a_reference_outside_the_tables():
    tables = make_tables()
    tables.grow("a", 4)
    tables.pool.share([1])
    with pytest.raises(AssertionError, match="references"):
        tables.check_invariants()
