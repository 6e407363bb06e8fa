import itertools
import json
import re

import pytest

from benchmarks.request_traces import SYNTHETIC, conversations, read_trace


def entry(**changes):
    given = {"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [0]}
    return given | changes


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_file_gives_tokens_that_are_equal_where_hash_ids_are(tmp_path):
    lines = [
        entry(timestamp=2500, input_length=600, output_length=4, hash_ids=[7, 1]),
        entry(timestamp=10, input_length=514, output_length=1, hash_ids=[7, 2]),
    ]
    second, first = read_trace(write(tmp_path / "t.jsonl", *lines))[::-1]
    assert (first.arrival, second.arrival) == (0.01, 2.5)
    assert first.prompt == [*range(7 * 512, 8 * 512), 1024, 1025]
    assert second.prompt == [*range(7 * 512, 8 * 512), *range(512, 600)]
    assert (len(first.output), len(second.output)) == (1, 4)
    again = read_trace(tmp_path / "t.jsonl")
    assert again == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "Expecting property name", id="not JSON"),
        pytest.param("[]", r"must be a JSON object, got \[\]", id="no object"),
        pytest.param(entry(timestamp=-1), "timestamp must be at least 0, got -1"),
        pytest.param(entry(timestamp=None), "timestamp must be a number, got None"),
        pytest.param(
            entry(input_length=0), r"input_length must be an integer in \[1, .*got 0"
        ),
        pytest.param(entry(output_length=1.5), "output_length must be .* got 1.5"),
        pytest.param(
            entry(input_length=513),
            r"input_length of 513 needs a list of 2 hash_ids, got \[0\]",
        ),
        pytest.param(entry(hash_ids=[-1]), "each of hash_ids must be .* got -1"),
        pytest.param(entry(hash_ids=[True]), "each of hash_ids must be .* got True"),
        pytest.param(
            entry(hash_ids=[2**23]),
            r"must be an integer in \[0, 8388608\), got 8388608",
        ),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(tmp_path, line, message):
    text = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(entry())}\n\n{text}\n")
    with pytest.raises(ValueError, match=f"^t.jsonl, line 3: .*{message}"):
        read_trace(path)


def test_a_file_without_requests_is_an_error(tmp_path):
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=re.escape("t.jsonl has no request")):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", list(SYNTHETIC))
def test_a_seed_gives_one_trace_in_the_order_of_arrival(name):
    trace = SYNTHETIC[name](1)
    assert trace == SYNTHETIC[name](1) != SYNTHETIC[name](2)
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals)


def test_a_turn_continues_what_was_said():
    trace = conversations(0, num_conversations=1, num_turns=3)
    for turn, following in itertools.pairwise(trace):
        said = turn.prompt + turn.output
        assert following.prompt[: len(said)] == said
        assert 50 <= len(following.prompt) - len(said) <= 400
