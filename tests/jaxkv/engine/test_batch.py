import numpy as np
import pytest

from jaxkv import NULL_BLOCK, SamplingParams
from jaxkv.engine.batch import BatchBuilder, make_buckets
from jaxkv.host.request import Request
from jaxkv.host.schedule import Schedule, ScheduledRow


def builder(max_num_seqs=4, max_num_batched_tokens=16):
    return BatchBuilder(
        buckets=make_buckets(max_num_seqs, max_num_batched_tokens),
        block_size=4,
        num_blocks=10,
        max_model_len=20,
        vocab_size=100,
    )


def row(request_id, tokens, start=0, num_tokens=None, **params):
    request = Request(
        request_id,
        tokens,
        SamplingParams(temperature=0.0, **params),
        max_total_tokens=len(tokens) + 5,
        eos_token_ids=(7,),
    )
    num_tokens = len(tokens) - start if num_tokens is None else num_tokens
    return ScheduledRow(
        request, 0, start, num_tokens, start + num_tokens == len(tokens)
    )


def build(rows, tables):
    return builder().build(Schedule(tuple(rows)), tables.__getitem__, {}.__getitem__)


def test_rows_lie_one_after_another_and_padding_points_at_the_null_block():
    rows = [row("a", [11, 12, 13, 14, 15]), row("b", [21, 22, 23, 24, 25, 26], start=5)]
    batch = build(rows, {"a": [3, 1], "b": [2, 9]})
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 26, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert batch.slot_mapping.tolist() == [12, 13, 14, 15, 4, 37, 0, 0]
    assert batch.block_tables[:2].tolist() == [[3, 1, 0, 0, 0], [2, 9, 0, 0, 0]]
    assert (batch.block_tables[2:] == NULL_BLOCK).all()
    assert batch.kv_lens.tolist() == [5, 6, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 5, 6, 6, 6]
    assert batch.sample_indices[:2].tolist() == [4, 5]


def test_a_line_of_the_tables_keeps_nothing_of_the_batch_before():
    shared = builder()
    long, short = row("a", list(range(20))), row("b", [1, 2])
    build_one = lambda r, table: shared.build(  # noqa: E731
        Schedule((r,)), lambda _: table, {}.__getitem__
    )
    first = build_one(long._replace(num_tokens=16, samples=False), [1, 2, 3, 4, 5])
    second = build_one(short, [6])
    assert second.block_tables[0].tolist() == [6, 0, 0, 0, 0]
    assert first.block_tables is not second.block_tables
    assert first.token_ids is not second.token_ids


@pytest.mark.parametrize(
    ("q_lens", "expected"),
    [
        ([1], (1, 1)),
        ([1] * 8, (8, 8)),
        ([1] * 9, (16, 16)),
        ([1] * 17, (24, 24)),
        ([1] * 32, (32, 32)),
        ([32], (16, 32)),
        ([17], (16, 32)),
        ([8], (8, 16)),
        ([7], (8, 8)),
        ([1] * 15 + [17], (16, 32)),
        ([1] * 16 + [16], (32, 32)),
        ([1] * 16 + [32], (32, 64)),
        ([1] * 20 + [6, 6], (32, 32)),
        ([33], (32, 64)),
        ([16] * 4, (32, 64)),
        ([128], (32, 128)),
    ],
)
def test_equal_buckets_are_for_rows_of_one_token(q_lens, expected):
    assert builder(32, 128).bucket_for(q_lens) == expected


def test_without_a_larger_bucket_longer_rows_go_to_an_equal_one():
    assert builder(4, 4).bucket_for([4]) == (4, 4)


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        ([row("a", [1] * 5)], {"a": [3]}, "'a' attends to 5 tokens, but .* 1 blocks"),
        ([row("a", [1])], {"a": [10]}, r"block ids outside \[1, 9\]: \[10\]"),
        ([row("a", [1])], {"a": [0]}, r"block ids outside \[1, 9\]: \[0\]"),
        ([row("a", [1])], {"a": [-1]}, r"block ids outside \[1, 9\]: \[-1\]"),
        ([row("a", [1] * 21, start=20)], {"a": [1, 2, 3, 4, 5, 6]}, "position 20"),
        ([row("a", [100])], {"a": [1]}, "outside the vocabulary of 100"),
        ([row("a", [-1])], {"a": [1]}, "outside the vocabulary of 100"),
        ([row("a", [1]), row("b", [1])], {"a": [1], "b": [1]}, "to one slot"),
    ],
    ids=[
        "table too short",
        "block past the pool",
        "null block",
        "negative block",
        "past max_model_len",
        "token past the vocabulary",
        "negative token",
        "shared slot",
    ],
)
def test_a_value_that_would_go_astray_on_the_device_is_refused(rows, tables, message):
    with pytest.raises(ValueError, match=message):
        build(rows, tables)


def test_min_tokens_suppresses_eos_and_stop_ids_until_it_is_reached():
    rows = [row("a", [1], min_tokens=2, stop_token_ids=[9]), row("b", [1])]
    batch = build(rows, {"a": [1], "b": [2]})
    suppressed = batch.sampling.suppressed_ids
    assert sorted(set(suppressed[0].tolist())) == [7, 9, 100]
    assert set(suppressed[1].tolist()) == {100}


def test_history_is_staged_for_rows_with_penalties_only():
    plain = build([row("a", [5, 6])], {"a": [1]}).sampling.history
    assert not plain.any()
    assert not plain.flags.writeable
    batch = build(
        [row("a", [5, 6]), row("b", [8, 9], presence_penalty=1.0)],
        {"a": [1], "b": [2]},
    )
    assert not batch.sampling.history[0].any()
    assert batch.sampling.history[1, :2].tolist() == [8, 9]
    assert batch.sampling.history_lens[:2].tolist() == [2, 2]
    np.testing.assert_array_equal(batch.sampling.prompt_lens[:2], [2, 2])
