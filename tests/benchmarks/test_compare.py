"""The comparison: turns, figures and agreement, with engines made of a few lines."""

import importlib
import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare, compare_report, peer_process
from benchmarks.compare import OURS, Peer
from benchmarks.peer_process import Failure, Python
from convert import convert_checkpoint, export_checkpoint
from jaxkv.engine.checkpoint import load_config, load_params
from tests.checkpoints import write_tiny_checkpoint
from tests.helpers import dense_greedy

REQUESTS = [
    {"id": "a", "prompt": [1, 2, 3], "max_tokens": 2},
    {"id": "b", "prompt": [1, 2, 9, 9, 9], "max_tokens": 3},
]
# An engine: {seconds} for all; the first tokens after a quarter and half of them.
RUNNER = """
import json, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
with Path({order!r}).open("a") as order:
    order.write({name!r} + "\\n")
seconds = {seconds}
requests = {{
    r["request_id"]: {{
        "arrival": 0.0,
        "first_token": seconds * (1 + i) / 4,
        "finished": seconds,
        "tokens": [7] * r["max_tokens"],
    }}
    for i, r in enumerate(job["requests"])
}}
{change}
result = {{
    "seconds": seconds,
    "cpu_seconds": seconds,
    "load_seconds": 1.0,
    "versions": {{{name!r}: "1.2"}},
    "settings": {{"threads": job["threads"], "model": Path(job["model"]).name}},
    "requests": requests,
}}
Path(sys.argv[2]).write_text(json.dumps(result))
"""


class World:
    """A folder with a trace, a checkpoint, environments and engines in them."""

    def __init__(self, folder):
        self.folder = folder
        self.order = folder / "order"
        self.trace = folder / "some.json"
        self.trace.write_text(json.dumps({"traces": {"mixed": REQUESTS, "none": []}}))
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        digest = compare.checkpoint_digest(self.checkpoint)
        self.models = folder / "models" / f"checkpoint-{digest}"
        (self.models / "huggingface").mkdir(parents=True)  # so nothing is exported

    def peer(self, name, seconds=1.0, change="", package="json", maker=None):
        """An engine in an environment of its own; ours is in this one."""
        runner = self.folder / f"run_{name}.py"
        runner.write_text(
            RUNNER.format(
                order=str(self.order), name=name, seconds=seconds, change=change
            )
        )
        environment = None if name == OURS else name
        if environment is not None:
            python = self.folder / "environments" / name / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)
        return Peer(name, environment, package, runner, maker)

    def run(self, peers, *options):
        arguments = ["--checkpoint", str(self.checkpoint), "--trace", str(self.trace)]
        arguments += ["--environments", str(self.folder / "environments")]
        arguments += ["--models", str(self.folder / "models"), "--threads", "3"]
        return compare.main([*arguments, *options], peers)

    def ran(self):
        return self.order.read_text().split()


@pytest.fixture
def world(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    yield World(tmp_path)
    signal.signal(signal.SIGTERM, before)


def records(printed):
    return [json.loads(x) for x in printed.out.splitlines() if x.startswith("{")]


def rows(printed):
    """The table's rows: engine -> its columns."""
    lines = [x for x in printed.out.splitlines() if x.startswith("| ")]
    split = [[column.strip() for column in x.strip("|").split("|")] for x in lines[1:]]
    return {columns[0]: columns[1:] for columns in split}


def test_the_table_has_each_engine_and_how_it_stands_to_ours(world, capsys):
    peers = [world.peer(OURS, 0.5), world.peer("slow", 2.0), world.peer("fast", 0.25)]
    assert world.run(peers, "--repeats", "1") == 0
    printed = capsys.readouterr()
    table = rows(printed)
    # 5 output tokens and 8 prompt tokens; first tokens at a quarter and a half.
    assert list(table) == ["fast", OURS, "slow"]
    assert table["slow"][:4] == ["2.5", "6.5", "750", "1000"]
    assert table[OURS][:4] == ["10.0", "26.0", "188", "250"]
    assert [columns[5] for columns in table.values()] == ["0.50x", "1.00x", "4.00x"]
    assert "- slow: slow 1.2, threads 3, model huggingface." in printed.out
    first = records(printed)[0]
    assert first["trace"] == "some.json:mixed"
    assert (first["prompt_tokens"], first["output_tokens"]) == (8, 5)


def test_turns_alternate_and_the_ratio_is_of_runs_side_by_side(world, capsys):
    # Ours takes as long as its turn's number; the other always one second.
    slower = f"seconds = Path({str(world.order)!r}).read_text().count({OURS!r})"
    ours = world.peer(OURS, change="")
    source = ours.runner.read_text().replace("seconds = 1.0", slower)
    ours.runner.write_text(source)
    assert world.run([ours, world.peer("x"), world.peer("y")]) == 0
    assert world.ran() == [OURS, "x", "y", "y", "x", OURS, OURS, "x", "y"]
    printed = capsys.readouterr()
    assert [record["turn"] for record in records(printed)] == [0] * 3 + [1] * 3 + [
        2
    ] * 3
    assert rows(printed)[OURS][0] == "2.5"  # the median of 5, 2.5 and 1.67
    assert rows(printed)["x"][5] == "0.50x"


def test_requests_agree_if_every_token_does(world, capsys):
    wrong = "requests['b']['tokens'][-1] = 8"
    peers = [world.peer(OURS), world.peer("other", change=wrong)]
    peers.append(world.peer("transformers_padded", change=wrong))
    assert world.run(peers, "--repeats", "1") == 0
    table = rows(capsys.readouterr())
    assert table[OURS][6:] == ["2/2", "1/2"]
    assert table["other"][6:] == ["1/2", "2/2"]
    # What transformers generated in float32 is known in later runs.
    assert world.run(peers[:2], "--repeats", "1", "--dtype", "bfloat16") == 0
    assert rows(capsys.readouterr())[OURS][6:] == ["2/2", "1/2"]
    assert world.run(peers[:1], "--repeats", "1", "--limit", "1") == 0
    assert rows(capsys.readouterr())[OURS][6:] == ["1/1", "-"]


def test_the_reference_is_of_float32(world, capsys):
    peers = [world.peer(OURS), world.peer("transformers_padded")]
    assert world.run(peers, "--repeats", "1", "--dtype", "bfloat16") == 0
    assert rows(capsys.readouterr())[OURS][6:] == ["2/2", "-"]


def test_an_engine_that_is_not_there_is_named(world, capsys):
    gone = Peer("gone", "gone", "json", world.folder / "none.py")
    peers = [world.peer(OURS), gone, world.peer("bare", package="no_such_package")]
    assert world.run(peers, "--repeats", "1") == 0
    printed = capsys.readouterr()
    assert list(rows(printed)) == [OURS]
    python = world.folder / "environments"
    assert (
        f"- gone: not installed: there is no {python}/gone/bin/python." in printed.out
    )
    assert (
        f"- bare: not installed: {python}/bare/bin/python has no no_such_package."
        in printed.out
    )


def test_an_engine_that_fails_stops_no_other_and_runs_no_more(world, capsys):
    fails = world.peer("fails", change="raise SystemExit('out of luck')")
    short = world.peer("short", change="requests['b']['tokens'].pop()")
    lost = world.peer("lost", change="del requests['a']")
    peers = [world.peer(OURS), fails, short, lost, world.peer("x")]
    assert world.run(peers, "--repeats", "2") == 1
    assert world.ran() == [OURS, "fails", "short", "lost", "x", "x", OURS]
    printed = capsys.readouterr()
    assert list(rows(printed)) == [OURS, "x"]
    assert (
        "- fails failed: exit status 1; it ended with\n      out of luck" in printed.out
    )
    assert "short failed: its result is wrong: b has 2 tokens, not 3" in printed.out
    assert "lost failed: its result is wrong: requests are ['b'], not ['a', 'b']" in (
        printed.out
    )


def test_others_run_without_ours(world, capsys):
    peers = [world.peer(OURS, change="sys.exit(1)"), world.peer("x")]
    assert world.run(peers, "--repeats", "1") == 1
    assert rows(capsys.readouterr())["x"][5:] == ["-", "-", "-"]


def test_an_engines_own_model_is_made_once(world, capsys):
    maker = world.folder / "maker.py"
    maker.write_text(
        "import sys, pathlib\n"
        "assert pathlib.Path(sys.argv[1]).name == 'huggingface'\n"
        "pathlib.Path(sys.argv[2]).mkdir()\n"
    )
    peers = [world.peer(OURS), world.peer("x", maker=maker)]
    assert world.run(peers, "--repeats", "1") == 0
    assert (world.models / "x").is_dir()
    maker.write_text("raise SystemExit('made again')")
    assert world.run(peers, "--repeats", "1") == 0
    assert "model x. " in capsys.readouterr().out
    (world.models / "x").rmdir()
    assert world.run(peers, "--repeats", "1") == 1
    printed = capsys.readouterr()
    assert "x failed: its model could not be made: exit status 1" in printed.out
    assert not (world.models / "x").exists()


def test_only_the_peers_that_are_asked_for_run(world, capsys):
    peers = [world.peer(OURS), world.peer("x"), world.peer("y")]
    assert world.run(peers, "--repeats", "1", "--peers", "y") == 0
    assert world.ran() == [OURS, "y"]


def test_files_are_left(world, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    output = world.folder / "out"
    assert world.run([world.peer(OURS)], "--repeats", "1", "--output", str(output)) == 0
    printed = capsys.readouterr()
    assert json.loads((output / "compare.jsonl").read_text()) == records(printed)[0]
    assert (output / "compare.md").read_text() in f"{printed.out}\n"
    assert "No plot: matplotlib is not installed" in printed.err


def test_the_plot_shows_every_engine(tmp_path):
    pytest.importorskip("matplotlib")
    record = {"model": "m", "dtype": "float32", "trace": "t", "turn": 0}
    record |= {"output_tokens_per_s": 5.0, "ttft_ms_median": 1.0, "ttft_ms_p99": 2.0}
    both = [record | {"engine": name} for name in (OURS, "x")]
    report = compare_report.Report(both, {}, {}, "machine", None, "command", OURS)
    assert compare_report._plot(report, tmp_path / "plot.png") is None
    assert (tmp_path / "plot.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "nope"], r"has no trace 'nope'; it has \['mixed', 'none'\]"),
        (["--name", "none"], "the trace 'none' of .* is empty"),
        (["--trace", "/nowhere"], "/nowhere is no file of traces: FileNotFoundError"),
        (["--repeats", "0"], "argument --repeats: must be at least 1, got 0"),
        (["--peers", "vlm"], "argument --peers: invalid choice: 'vlm'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--checkpoint", "/nowhere"], "/nowhere is no converted checkpoint"),
    ],
)
def test_wrong_arguments_are_said(world, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        world.run([world.peer(OURS), world.peer("x")], *options)
    assert_matches(message, capsys.readouterr().err)
    assert not world.order.exists()


def assert_matches(pattern, text):
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_a_warmup_shares_as_much_but_nothing_with_the_requests():
    requests = [
        {"request_id": "a", "prompt": [0, 5, 6], "max_tokens": 4},
        {"request_id": "b", "prompt": [0, 5, 7, 1], "max_tokens": 2},
    ]
    assert compare.other_tokens(requests) == [
        {"request_id": "warmup-a", "prompt": [1, 6, 7], "max_tokens": 4},
        {"request_id": "warmup-b", "prompt": [1, 6, 0, 2], "max_tokens": 2},
    ]


def test_the_cache_has_room_for_warmup_and_trace(world):
    def kv_tokens(*options):
        parser = compare._parser(compare.PEERS)
        arguments = ["--checkpoint", str(world.checkpoint), "--trace", "t", *options]
        requests = [
            {"request_id": str(n), "prompt": [1] * n, "max_tokens": 1}
            for n in (127, 128, 255)
        ]
        return compare.make_job(parser.parse_args(arguments), requests)["kv_tokens"]

    assert kv_tokens() == 2 * (128 + 256 + 256)
    assert kv_tokens("--max-num-seqs", "2") == 2 * 2 * 256
    assert kv_tokens("--one-at-a-time") == 2 * 256


def test_p99_is_the_nearest_rank():
    requests = [
        {"request_id": str(i), "prompt": [1], "max_tokens": 1} for i in range(200)
    ]
    done = {
        str(i): {"arrival": 1.0, "first_token": 2.0 + i, "tokens": [1]}
        for i in range(200)
    }
    outcome = {"seconds": 4, "cpu_seconds": 4, "load_seconds": 1, "requests": done}
    figures = compare.measure(outcome, requests)
    assert figures["ttft_ms_p99"] == 1000 * 198
    assert figures["ttft_ms_median"] == 1000 * 100.5


def test_a_checkpoint_written_anew_has_another_digest(world):
    before = compare.checkpoint_digest(world.checkpoint)
    assert before == compare.checkpoint_digest(world.checkpoint)
    os.utime(world.checkpoint / "config.json", ns=(5, 5))
    assert before != compare.checkpoint_digest(world.checkpoint)


# --- processes


def write_script(folder, source):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    return path


PARENT = """
    import subprocess, sys, time
    from pathlib import Path
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sys.argv[1]).write_text(str(child.pid))
    print("begun", flush=True)
    time.sleep(600)
"""


def ends(pid):
    """Say whether a process ends soon: it was told to, by now."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path):
    script, pid = write_script(tmp_path, PARENT), tmp_path / "pid"
    with pytest.raises(Failure, match=r"took more than 4 s; it ended with\nbegun"):
        Python(Path(sys.executable), {}).run([script, pid], tmp_path / "log", 4)
    assert ends(int(pid.read_text()))


def test_an_interrupt_ends_a_process_and_its_children(tmp_path):
    script, pid = write_script(tmp_path, PARENT), tmp_path / "pid"

    def interrupt(*_):
        if pid.exists() and pid.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            Python(Path(sys.executable), {}).run([script, pid], tmp_path / "log", 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ends(int(pid.read_text()))


def test_memory_is_that_of_the_whole_tree(tmp_path):
    script = write_script(
        tmp_path,
        """
        import subprocess, sys, time
        if len(sys.argv) == 1:
            child = subprocess.Popen([sys.executable, __file__, "child"])
        held = b"x" * (100 << 20)
        time.sleep(1.5)
        """,
    )
    peak = Python(Path(sys.executable), {}).run([script], tmp_path / "log", 60)
    assert 200 < peak / 2**20 < 300


def test_memory_between_two_looks_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_process, "SAMPLE_SECONDS", 1.2)
    source = "import time; len(b'x' * (150 << 20)); time.sleep(2)"
    script = write_script(tmp_path, source)
    peak = Python(Path(sys.executable), {}).run([script], tmp_path / "log", 60)
    assert 150 < peak / 2**20 < 200


def test_variables_are_set_and_taken_away(tmp_path, monkeypatch):
    monkeypatch.setenv("GONE", "1")
    script = write_script(
        tmp_path,
        "import os; assert os.environ['NEW'] == '2' and 'GONE' not in os.environ",
    )
    python = Python(Path(sys.executable), {"NEW": "2", "GONE": None})
    python.run([script], tmp_path / "log", 60)


# --- runners


@pytest.fixture
def runners(monkeypatch):
    """Import a runner as the script that it is: its neighbours by their names."""
    monkeypatch.syspath_prepend(str(compare.RUNNERS))
    yield importlib.import_module
    for name in [name for name, module in sys.modules.items() if is_runner(module)]:
        del sys.modules[name]


def is_runner(module):
    return Path(getattr(module, "__file__", None) or "/").parent == compare.RUNNERS


def test_runners_are_there():
    for peer in compare.PEERS:
        assert peer.runner.is_file()
        assert peer.maker is None or peer.maker.is_file()


class Counting:
    """An engine that gives every running request a token a step."""

    def __init__(self, harness):
        self.harness = harness
        self.running = {}
        self.most = 0

    def add_request(self, request):
        self.running[request.request_id] = request.max_tokens

    def step(self):
        self.most = max(self.most, len(self.running))
        new = []
        for name, left in list(self.running.items()):
            now = time.perf_counter()
            new.append(self.harness.Tokens(name, [left], now))
            self.running[name] = left - 1
            if left == 1:
                del self.running[name]
        return new


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_requests_arrive_at_once_or_one_after_the_other(runners, one_at_a_time):
    harness = runners("harness")
    engine = Counting(harness)
    requests = [harness.Request("a", [1], 3), harness.Request("b", [1, 2], 2)]
    result = harness.run(engine, requests, one_at_a_time=one_at_a_time)
    a, b = result["requests"]["a"], result["requests"]["b"]
    assert a["tokens"] == [3, 2, 1]
    assert b["tokens"] == [2, 1]
    assert engine.most == (1 if one_at_a_time else 2)
    assert a["arrival"] < a["first_token"] < a["finished"] <= result["seconds"]
    assert (b["arrival"] >= a["finished"]) == one_at_a_time
    assert b["first_token"] > b["arrival"]


def test_our_runner_does_its_job(runners, tmp_path, monkeypatch):
    harness, run_jaxkv = runners("harness"), runners("run_jaxkv")
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    requests = [
        {"request_id": "a", "prompt": [1, 2, 3], "max_tokens": 5},
        {"request_id": "b", "prompt": [4, 5], "max_tokens": 2},
    ]
    job = {
        "checkpoint": str(checkpoint),
        "model": "",
        "dtype": "float32",
        "threads": len(os.sched_getaffinity(0)),
        "max_num_seqs": 2,
        "max_num_batched_tokens": 2,
        "kv_tokens": 256,
        "prefix_caching": True,
        "one_at_a_time": False,
        "warmup": compare.other_tokens(requests),
        "requests": requests,
    }
    (tmp_path / "job").write_text(json.dumps(job))
    arguments = ["run_jaxkv.py", str(tmp_path / "job"), str(tmp_path / "result")]
    monkeypatch.setattr(sys, "argv", arguments)
    harness.main(run_jaxkv.Jaxkv)
    result = json.loads((tmp_path / "result").read_text())
    assert compare.measure(result, requests)["output_tokens"] == 7
    params, config = load_params(checkpoint), load_config(checkpoint)
    for request in requests:
        expected = dense_greedy(
            params, config, request["prompt"], request["max_tokens"]
        )
        assert result["requests"][request["request_id"]]["tokens"] == expected
    assert result["settings"]["num_blocks"] == 17


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_files_have_the_weights(runners, tmp_path, monkeypatch, dtype):
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    exported, made, back = tmp_path / "exported", tmp_path / "made", tmp_path / "back"
    export_checkpoint(checkpoint, exported, progress=False)
    monkeypatch.setattr(sys, "argv", ["make", str(exported), str(made)])
    runners("make_llama_cpp").main()
    convert_checkpoint(made / f"{dtype}.gguf", back, progress=False)
    assert load_config(back).dtype == dtype
    expected, params = load_params(checkpoint, dtype=dtype), load_params(back)
    assert params.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(params[name], array, err_msg=name)


def test_gguf_files_are_not_made_of_what_they_cannot_hold(
    runners, tmp_path, monkeypatch
):
    config = {"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = tmp_path / "made"
    monkeypatch.setattr(sys, "argv", ["make", str(tmp_path), str(made)])
    with pytest.raises(SystemExit, match="only a Llama whose rotary frequencies"):
        runners("make_llama_cpp").main()
    assert not made.exists()
