"""Requests with the times at which they arrive: made by seed, or read from a file.

A trace gives tokens, not only lengths, so that requests share prefixes as they would:
what an answer was is part of the next prompt of its conversation.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HASHED_TOKENS = 512
"""Tokens for each of a file's `hash_ids`."""

_VOCAB = 128_000
_NUM_HASH_IDS = 2**32 // HASHED_TOKENS


class TracedRequest(NamedTuple):
    """One request of a trace.

    Attributes:
        arrival: Seconds after the trace's begin.
        prompt: Its tokens.
        output: The tokens it will generate.
    """

    arrival: float
    prompt: list[int]
    output: list[int]


def long_prompts(seed: int, num_requests: int = 400) -> list[TracedRequest]:
    """Make requests of 500..4,000 tokens with answers of 50..400, 12 a second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / 12, num_requests))
    return [
        TracedRequest(
            float(arrival),
            _tokens(rng, 500, 4000),
            _tokens(rng, 50, 400),
        )
        for arrival in arrivals
    ]


def conversations(
    seed: int, num_conversations: int = 60, num_turns: int = 4
) -> list[TracedRequest]:
    """Make conversations that begin with one of two prompts of 512 tokens.

    In each turn the user adds 50..400 tokens to all that was said, and gets 100..500.
    The next turn comes 1 s later and then at any time, 5 s later in the mean, whether
    there was an answer by then or not.
    """
    rng = np.random.default_rng(seed)
    systems = [_tokens(rng, 512, 512) for _ in range(2)]
    trace = []
    for number in range(num_conversations):
        said = systems[number % len(systems)]
        arrival = float(rng.uniform(0, 10))
        for _ in range(num_turns):
            prompt = said + _tokens(rng, 50, 400)
            output = _tokens(rng, 100, 500)
            trace.append(TracedRequest(arrival, prompt, output))
            said = prompt + output
            arrival += 1 + float(rng.exponential(5))
    return sorted(trace, key=_arrival)


def bursts(
    seed: int, num_bursts: int = 3, num_requests: int = 64
) -> list[TracedRequest]:
    """Make bursts, 8 s apart: prompts of 64..1,024 tokens and outputs of 100..1,000."""
    rng = np.random.default_rng(seed)
    return [
        TracedRequest(
            8.0 * number,
            _tokens(rng, 64, 1024),
            _tokens(rng, 100, 1000),
        )
        for number in range(num_bursts)
        for _ in range(num_requests)
    ]


SYNTHETIC = {
    "long_prompts": long_prompts,
    "conversations": conversations,
    "bursts": bursts,
}


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace in the form in which Mooncake's are published.

    A line is a JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens)
    and `hash_ids`, one for each 512 tokens of the prompt or what is left of it. Equal
    hash ids give equal tokens, others give others. No hash id says what was generated,
    so outputs are never found in another's prompt.

    Returns:
        The requests in the order of their arrival.

    Raises:
        ValueError: A line is not such an object; the message has its number.
    """
    trace = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    trace.append(_parse(json.loads(line), number))
                except ValueError as error:
                    raise ValueError(f"{path.name}, line {number}: {error}") from None
    if not trace:
        raise ValueError(f"{path.name} has no request")
    return sorted(trace, key=_arrival)


def _parse(entry: Any, number: int) -> TracedRequest:
    if not isinstance(entry, dict):
        raise ValueError(f"must be a JSON object, got {entry!r}")
    timestamp = entry.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise ValueError(f"timestamp must be a number, got {timestamp!r}")
    if not 0 <= timestamp < float("inf"):
        raise ValueError(f"timestamp must be at least 0, got {timestamp!r}")
    num_prompt = _integer("input_length", entry.get("input_length"), 1, 2**32)
    num_output = _integer("output_length", entry.get("output_length"), 1, 2**32)
    hash_ids = entry.get("hash_ids")
    expected = -(-num_prompt // HASHED_TOKENS)
    if not isinstance(hash_ids, list) or len(hash_ids) != expected:
        raise ValueError(
            f"an input_length of {num_prompt} needs a list of {expected} hash_ids, "
            f"got {hash_ids!r}"
        )
    for hash_id in hash_ids:
        _integer("each of hash_ids", hash_id, 0, _NUM_HASH_IDS)
    output = _tokens(np.random.default_rng(number), num_output, num_output)
    return TracedRequest(timestamp / 1000, _prompt(hash_ids)[:num_prompt], output)


def _integer(name: str, value: Any, low: int, end: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < end:
        raise ValueError(f"{name} must be an integer in [{low}, {end}), got {value!r}")
    return value


def _prompt(hash_ids: Iterable[int]) -> list[int]:
    return [
        token
        for hash_id in hash_ids
        for token in range(hash_id * HASHED_TOKENS, (hash_id + 1) * HASHED_TOKENS)
    ]


def _tokens(rng: np.random.Generator, fewest: int, most: int) -> list[int]:
    return rng.integers(0, _VOCAB, rng.integers(fewest, most + 1)).tolist()


def _arrival(request: TracedRequest) -> float:
    return request.arrival
