"""What every runner shares: the job it reads, the loop that times, the result.

A runner is a script, started as `ENV/bin/python run_NAME.py JOB RESULT` with the Python
of the peer's own environment, in which this repository is not installed: it imports
this file as its neighbour and nothing else from here. One process is one run: it loads
the model, runs the job's warm-up, which is not counted, and then its requests.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Request(NamedTuple):
    """One request: greedy, exactly `max_tokens` tokens, whatever they are."""

    request_id: str
    prompt: list[int]
    max_tokens: int


class Job(NamedTuple):
    """What a runner is told to do.

    Attributes:
        checkpoint: A folder that `jaxkv convert` wrote.
        model: The same weights as a Hugging Face folder, or in the peer's own format.
        dtype: Of weights, products and the KV cache: float32 or bfloat16.
        threads: Processors to compute on.
        max_num_seqs: Most requests that run at the same time.
        max_num_batched_tokens: Most tokens of one step; None: what suits the engine.
        kv_tokens: Tokens for which the KV cache must have room.
        prefix_caching: Share equal beginnings of prompts.
        one_at_a_time: A request arrives when the one before has ended; else all at
            once.
        warmup: As long as `requests`, of other tokens.
        requests: Those that count.
    """

    checkpoint: str
    model: str
    dtype: str
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    kv_tokens: int
    prefix_caching: bool
    one_at_a_time: bool
    warmup: list[Request]
    requests: list[Request]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its output included."""
        return max(len(r.prompt) + r.max_tokens for r in self.requests)


class Tokens(NamedTuple):
    """Tokens that a request got, and when (`time.perf_counter`)."""

    request_id: str
    token_ids: list[int]
    time: float


class Engine(Protocol):
    """What a runner makes of its peer.

    Attributes:
        versions: Of the packages that compute.
        settings: What was chosen for this peer, in its own words.
    """

    versions: dict[str, str]
    settings: dict[str, Any]

    def add_request(self, request: Request) -> None:
        """Take a request in; its id is new."""
        ...

    def step(self) -> Iterable[Tokens]:
        """Compute for a while, or wait for those who do, and say what came of it."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...


def main(start: Callable[[Job], Engine]) -> None:
    """Do the job that the command line names and write its result.

    Args:
        start: Imports the peer, loads the model and returns the engine. The process is
            held to its processors before.
    """
    job_file, result_file = sys.argv[1:]
    job = read_job(Path(job_file))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    began = time.perf_counter()
    engine = start(job)
    try:
        load_seconds = time.perf_counter() - began
        run(engine, job.warmup, one_at_a_time=job.one_at_a_time)
        result = run(engine, job.requests, one_at_a_time=job.one_at_a_time)
    finally:
        engine.close()
    result |= {
        "load_seconds": load_seconds,
        "versions": engine.versions,
        "settings": engine.settings,
    }
    Path(result_file).write_text(json.dumps(result))


def read_job(path: Path) -> Job:
    """Read what `benchmarks.compare` wrote."""
    fields = json.loads(path.read_text())
    for name in ("warmup", "requests"):
        fields[name] = [Request(**request) for request in fields[name]]
    return Job(**fields)


def run(
    engine: Engine, requests: list[Request], *, one_at_a_time: bool
) -> dict[str, Any]:
    """Run requests to the end.

    Returns:
        The seconds that all took, by the clock and of this process's computing, and for
        each request its tokens and the seconds after the begin at which it arrived, got
        its first token and its last.
    """
    to_come = list(requests)
    running: dict[str, dict[str, Any]] = {}
    done: dict[str, dict[str, Any]] = {}
    lengths = {request.request_id: request.max_tokens for request in requests}
    start, cpu_start = time.perf_counter(), time.process_time()
    while to_come or running:
        while to_come and not (one_at_a_time and running):
            request = to_come.pop(0)
            running[request.request_id] = {
                "arrival": time.perf_counter() - start,
                "tokens": [],
            }
            engine.add_request(request)
        for new in engine.step():
            record = running[new.request_id]
            record["tokens"] += new.token_ids
            if record["tokens"]:
                record.setdefault("first_token", new.time - start)
            if len(record["tokens"]) >= lengths[new.request_id]:
                record["finished"] = new.time - start
                done[new.request_id] = running.pop(new.request_id)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "requests": done,
    }
