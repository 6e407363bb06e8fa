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
        max_num_seqs=max_num_seqs,
        max_model_len=20,
        vocab_size=100,
    )


def row(request_id, tokens, start=0, num_tokens=None, place=0, **params):
    request = Request(
        request_id,
        tokens,
        SamplingParams(temperature=0.0, **params),
        max_total_tokens=len(tokens) + 5,
        eos_token_ids=(7,),
    )
    num_tokens = len(tokens) - start if num_tokens is None else num_tokens
    num_samples = int(start + num_tokens == len(tokens))
    return ScheduledRow(request, place, 0, start, num_tokens, num_samples)


def build(rows, tables, shared=None, **options):
    schedule = Schedule(tuple(rows), **options)
    shared = shared or builder()
    return shared.build(schedule, tables.__getitem__, {}.__getitem__)


def test_rows_lie_one_after_another_and_padding_points_at_the_null_block():
    rows = [
        row("a", [11, 12, 13, 14, 15], place=1),
        row("b", [21, 22, 23, 24, 25, 26], start=5, place=3),
    ]
    _, batch = build(rows, {"a": [3, 1], "b": [2, 9]})
    assert batch.rows.tolist() == [1, 3, 4, 4]
    assert batch.token_ids.tolist() == [11, 12, 13, 14, 15, 26, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert batch.slot_mapping.tolist() == [12, 13, 14, 15, 4, 37, 0, 0]
    assert batch.kv_lens.tolist() == [5, 6, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 5, 6, 6, 6]
    assert batch.sample_indices[:2].tolist() == [4, 5]
    assert batch.num_samples.tolist() == [1, 1, 0, 0]
    assert (batch.pending_places == 8).all()


def new_blocks(batch):
    """[(row, place, block)], padding left out."""
    blocks = batch.new_blocks.T.tolist()
    assert blocks[-1] == [4, 5, NULL_BLOCK]  # no row's, off the end of the tables
    return [tuple(block) for block in blocks if block != blocks[-1]]


def test_a_table_is_sent_whole_when_a_row_is_new_and_then_as_it_grows():
    shared = builder()
    tables = {"a": [3, 1], "b": [6]}
    first = row("a", list(range(12)), num_tokens=5, place=2)
    new_rows, batch = build([first], tables, shared)
    assert (new_rows.rows, new_blocks(batch)) == ([2], [])
    assert new_rows.block_tables.tolist() == [[3, 1, 0, 0, 0]]
    tables["a"] += [7, 4]
    again = first._replace(start=5, num_tokens=7, num_samples=1)
    other = row("b", [1, 2], place=0)
    new_rows, batch = build([other, again], tables, shared)
    assert new_rows.rows == [0]
    assert new_rows.block_tables.tolist() == [[6, 0, 0, 0, 0]]
    assert new_blocks(batch) == [(2, 2, 7), (2, 3, 4)]


def test_a_row_is_sent_whole_after_every_admission_and_after_a_failure():
    shared = builder()
    request = row("a", [1, 2, 3], num_tokens=1)
    for scheduled in (
        request,
        request._replace(admission=1),
        request._replace(admission=2),
    ):
        new_rows, _ = build([scheduled], {"a": [3]}, shared)
        assert new_rows.rows == [0]
    assert build([scheduled], {"a": [3]}, shared)[0].rows == []
    shared.forget()
    assert build([scheduled], {"a": [3]}, shared)[0].rows == [0]


def test_a_token_that_only_the_device_knows_has_its_place():
    rows = [row("a", [1, 2, 3]), row("b", [4, 5], place=1)]
    rows[1] = rows[1]._replace(start=2, num_tokens=1)
    _, batch = build(rows, {"a": [3], "b": [5]})
    assert batch.token_ids.tolist() == [1, 2, 3, 0]
    assert batch.positions.tolist() == [0, 1, 2, 2]
    assert batch.slot_mapping.tolist() == [12, 13, 14, 22]
    assert batch.pending_places.tolist() == [4, 3, 4, 4]


def test_of_several_steps_in_one_the_first_tokens_are_sent_and_all_blocks():
    shared = builder()
    first = row("a", [1, 2, 3], num_tokens=3)
    build([first], {"a": [3]}, shared)
    again = first._replace(start=3, num_tokens=3, num_samples=3)
    new_rows, batch = build([again], {"a": [3, 8]}, shared, num_steps=3)
    assert (new_rows.rows, batch.pending_places.tolist()) == ([], [0])
    assert (batch.kv_lens.tolist(), batch.num_samples.tolist()) == ([4], [3])
    assert batch.new_blocks.tolist() == [[0], [1], [8]]


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


def test_min_tokens_and_stop_ids_are_sent_with_the_row():
    rows = [
        row("a", [1, 2], min_tokens=2, stop_token_ids=[9]),
        row("b", [1], place=1),
        row("c", [1], place=2, ignore_eos=True),
    ]
    new_rows, _ = build(rows, {"a": [1], "b": [2], "c": [3]})
    stop_ids = [sorted(set(ids.tolist())) for ids in new_rows.params.stop_ids]
    assert stop_ids == [[7, 9, 100], [7, 100], [100]]
    assert new_rows.params.min_lens.tolist() == [4, 1, 1]
    assert new_rows.params.prompt_lens.tolist() == [2, 1, 1]


def test_a_decoding_step_sends_few_bytes_whatever_the_length():
    for max_model_len in (100, 100_000):
        big = BatchBuilder(
            buckets=make_buckets(64, 64),
            block_size=16,
            num_blocks=10_000,
            max_num_seqs=64,
            max_model_len=max_model_len,
            vocab_size=100,
        )
        rows = [row(str(i), [1] * 60, start=59, place=i) for i in range(64)]
        tables = {str(i): [4 * i + j for j in range(1, 5)] for i in range(64)}
        build(rows, tables, big)
        new_rows, batch = build(rows, tables, big)
        assert new_rows.rows == []
        assert sum(array.nbytes for array in batch) == 13 * 256 + 4 + 2


def test_history_is_sent_for_rows_with_penalties_only():
    rows = [row("a", [5, 6]), row("b", [8, 9], presence_penalty=1.0, place=3)]
    new_rows, _ = build(rows, {"a": [1], "b": [2]})
    assert new_rows.histories == {3: [8, 9]}


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}])
def test_logprobs_are_wanted_if_a_row_that_samples_asks(params):
    _, batch = build([row("a", [5, 6], **params)], {"a": [1]})
    assert bool(batch.wants_logprobs) == bool(params)
    _, batch = build([row("a", [5, 6], num_tokens=1, **params)], {"a": [1]})
    assert not batch.wants_logprobs
