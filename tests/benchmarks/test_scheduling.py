"""The simulator: its arithmetic, its bookkeeping, and the oracle."""

import json
import math

import pytest

from benchmarks import scheduling
from benchmarks.preemption_oracle import Decided, cost, may_preempt, run_with_oracle
from benchmarks.request_traces import TracedRequest, bursts
from benchmarks.simulation import Simulation, percentile
from benchmarks.step_time import StepTime
from benchmarks.victim_order import ByLacking, PreemptionByLacking
from jaxkv.host.block_pool import BlockPool
from jaxkv.host.block_tables import BlockTables
from jaxkv.host.preemption import Preemption, units_of
from jaxkv.host.scheduler import Scheduler
from tests.jaxkv.host.test_preemption import make_running, victims_in_order

# Whole numbers: 100 s a step, 10 s a token, 1 s a token of K and V that is read,
# nothing for attention's products, and 8 tokens a second to or from the host.
PLAIN = StepTime(
    fixed=100, per_token=10, per_kv_token=1, per_pair=0, kv_bytes=2, bandwidth=16
)


def simulate(trace, time=PLAIN, kind=Scheduler, **options):
    preemption = options.pop("preemption", Preemption())
    limits = {
        "num_blocks": 100,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_swap_blocks": 100,
    }
    return Simulation(trace, time, kind(preemption=preemption, **(limits | options)))


def request(arrival, num_prompt, num_output, first=0):
    prompt = list(range(first, first + num_prompt))
    return TracedRequest(arrival, prompt, list(range(5000, 5000 + num_output)))


def test_the_time_of_a_step_adds_up():
    time = StepTime(
        fixed=1000, per_token=100, per_kv_token=1, per_pair=0.5, kv_bytes=8, bandwidth=4
    )
    # 3 tokens after 4: 7 of K and V, and 5 + 6 + 7 pairs.
    assert time.row(4, 3) == 300 + 7 + 9
    assert time.row(4, 0) == 0
    assert time.move(5) == 10
    assert time.step([(4, 3), (0, 1)], num_moved=5) == 1000 + 316 + 101.5 + 10
    assert time.step([], num_moved=5) == 10
    assert time.step([]) == 0
    assert time.prefill_rate(3) == 3 / (1000 + 300 + 3 + 3)


def test_a_request_arrives_when_its_time_has_come_and_idle_time_is_skipped():
    simulation = simulate([request(50, 20, 2), request(5000, 2, 1, first=900)])
    simulation.step()  # 16 tokens, which no row had
    assert simulation.clock == 50 + 100 + 160 + 16
    simulation.step()  # the other 4, and the first answer
    assert simulation.first_token == {"0": 326 + 100 + 40 + 20}
    simulation.step()  # the second, which ends it
    assert simulation.clock == 486 + 100 + 10 + 21
    assert not simulation.unfinished
    simulation.step()
    assert simulation.has_ended
    assert simulation.clock == 5000 + 100 + 20 + 2
    result = simulation.result()
    assert (result["steps"], result["seconds"]) == (4, 5122)
    assert (result["ttft_ms_median"], result["ttft_ms_p99"]) == (279_000, 436_000)
    assert result["output_tokens_per_s"] == round(3 / 5122, 1)
    assert result["lost_seconds"] == result["preemptions"] == 0


def test_percentiles():
    assert [percentile([3, 1, 2], p) for p in (1, 34, 67, 99)] == [1, 2, 3, 3]
    assert percentile(range(1, 201), 99) == 198


def test_what_was_said_before_is_found():
    first = request(0, 8, 5)
    then = TracedRequest(9000, first.prompt + first.output + [1, 2, 3, 4], [6])
    simulation = simulate([first, then])
    simulation.run()
    # Of its 17 tokens 12 were computed before, in 3 full blocks.
    assert simulation.result()["prefix_hit_percent"] == round(100 * 12 / 25, 1)


PRESSURE = [request(0, 12, 14, first=1000 * place) for place in range(3)]


@pytest.mark.parametrize("how", ["swap", "recompute"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_tokens_are_conserved(how, enable_prefix_caching):
    simulation = simulate(
        PRESSURE,
        num_blocks=14,
        preemption=Preemption(how=how),
        enable_prefix_caching=enable_prefix_caching,
    )
    while not simulation.has_ended:
        simulation.step()
        simulation.scheduler.check_invariants()
    assert simulation.scheduler.num_preemptions > 0
    # Each computed all of its tokens but the last once, besides those again.
    needed = 3 * (12 + 14 - 1)
    assert simulation.num_computed == needed + simulation.num_recomputed
    moved = simulation.num_moved_out, simulation.num_moved_in
    if how == "swap":
        assert simulation.num_recomputed == 0 < min(moved)
        assert math.isclose(sum(simulation.lost.values()), PLAIN.move(4 * sum(moved)))
    else:
        assert simulation.num_recomputed > 0
        assert moved == (0, 0)
    assert simulation.scheduler.pool.num_held == 0
    assert simulation.scheduler.swap_space.num_used == 0


def test_a_victim_pays_for_the_tokens_it_computes_again():
    simulation = simulate(PRESSURE, num_blocks=14, enable_prefix_caching=False)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    ((name, victim),) = [
        (name, r) for name, r in simulation.unfinished.items() if r.num_preemptions
    ]
    num_computed = simulation.reached[name]
    assert num_computed == len(victim.token_ids) - 1
    assert simulation.lost[name] == 0
    while victim.row is None:
        simulation.step()
    assert victim.num_computed_tokens == 15  # and one for the other request
    while victim.num_computed_tokens < num_computed:
        simulation.step()
    # 10 s a token. In the first step there would have been no row that reads 15.
    assert simulation.lost[name] == 10 * num_computed + 15
    assert simulation.num_recomputed == num_computed


def test_a_fork_goes_the_same_way_and_leaves_the_other_alone():
    simulation = simulate(PRESSURE, num_blocks=14, preemption=Preemption(how="swap"))
    for _ in range(8):
        simulation.step()
    clock, computed = simulation.clock, simulation.num_computed
    fork = simulation.fork()
    fork.run()
    assert (simulation.clock, simulation.num_computed) == (clock, computed)
    simulation.scheduler.check_invariants()
    simulation.run()
    assert simulation.result() == fork.result()


def test_a_decision_leaves_the_order_of_victims_alone():
    options = {"how": "auto", "bytes_per_block": 1, "swap_bandwidth": 1}
    estimate = Preemption(**options, prefill_rate=2)
    decided = Decided(**options, prefill_rate=2)
    decided.ways.extend([False, True])
    assert [decided.swaps(1, 16) for _ in range(3)] == [False, True, True]
    assert decided.asked == [3]
    for always in (True, False):
        fixed = Decided(**options, prefill_rate=2, always=always)
        assert fixed.swaps(1, 16) is fixed.swaps(16, 1) is always
        for amounts in ((1, 16), (16, 1)):
            assert fixed.work_lost(*amounts) == estimate.work_lost(*amounts)


def oracle_case(always=None):
    preemption = Decided(
        how="auto",
        bytes_per_block=8,
        swap_bandwidth=16,
        prefill_rate=PLAIN.prefill_rate(16),
        always=always,
    )
    return simulate(PRESSURE, num_blocks=14, preemption=preemption)


def run_until_next_step_preempts(simulation):
    while True:
        simulation.arrive()
        fork = simulation.fork()
        fork.step()
        if fork.scheduler.num_preemptions:
            return
        simulation.step()


def test_a_cost_is_what_the_victim_pays_until_it_is_back():
    simulation = oracle_case()
    run_until_next_step_preempts(simulation)
    assert may_preempt(simulation)
    for way in (True, False):
        fixed = oracle_case(always=way)
        fixed.run()
        assert fixed.scheduler.num_preemptions == 1
        assert cost(simulation, [way]) == sum(fixed.lost.values()) > 0
    # What was estimated is what an empty decision says.
    assert cost(simulation, []) in (cost(simulation, [True]), cost(simulation, [False]))


@pytest.mark.parametrize("bandwidth", [0.25, 1, 4, 64])
def test_the_oracle_is_never_worse_by_its_own_measure(bandwidth):
    time = StepTime(bandwidth=1e9 * bandwidth)
    limits = scheduling.Limits(num_blocks=200, max_num_batched_tokens=512)
    trace = bursts(3, num_bursts=1, num_requests=12)
    lost = {}
    for way, always in (("swap", True), ("recompute", False), ("oracle", None)):
        simulation = scheduling.make_simulation(
            trace, time, limits, Decided, how="auto", always=always
        )
        if way == "oracle":
            regret = run_with_oracle(simulation, follow=True)
            assert regret.cheapest <= regret.estimated
            assert regret.steps > 5
        else:
            simulation.run()
        lost[way] = sum(simulation.lost.values())
    assert lost["oracle"] <= min(lost["swap"], lost["recompute"]) + 1e-9


def test_watching_changes_nothing():
    trace = bursts(3, num_bursts=1, num_requests=12)
    limits = scheduling.Limits(num_blocks=200)
    alone, watched = (
        scheduling.make_simulation(trace, StepTime(), limits, Decided, how="auto")
        for _ in range(2)
    )
    alone.run()
    regret = run_with_oracle(watched, follow=False)
    assert watched.result() == alone.result()
    assert 0 < regret.steps <= alone.scheduler.num_preemptions


def test_blocks_gained_beyond_those_lacking_do_not_count():
    block_tables = BlockTables(BlockPool(40, 4))
    # Tokens lost for each block gained: 4, 3 and 3.
    running = make_running(block_tables, [16, 3, 6])
    preemption = PreemptionByLacking()

    def order(lacking):
        preemption.lacking[0] = lacking
        units = preemption.by_work_lost(units_of(running), block_tables)
        return [unit[0].request_id for unit in units]

    assert order(lacking=1) == ["r1", "r2", "r0"]  # 3, 6 and 16
    assert order(lacking=4) == ["r2", "r1", "r0"]
    assert order(lacking=4) == victims_in_order(block_tables, running)


def test_the_scheduler_says_what_is_lacking():
    simulation = simulate(
        PRESSURE, num_blocks=14, kind=ByLacking, preemption=PreemptionByLacking()
    )
    simulation.run()
    assert simulation.scheduler.num_preemptions == 1
    assert simulation.scheduler.preemption.lacking == [1]


def test_the_command_line_prints_a_line_a_case(capsys, monkeypatch, tmp_path):
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 20}
    path.write_text(
        "".join(json.dumps(line | {"hash_ids": [1, place]}) + "\n" for place in (2, 3))
    )
    arguments = ["--trace", str(path), "--bandwidth", "4", "16", "--num-blocks", "60"]
    monkeypatch.setattr("sys.argv", ["scheduling", *arguments])
    scheduling.main()
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [(case["time"]["bandwidth"], case["preemption"]) for case in lines] == [
        (bandwidth, how)
        for bandwidth in (4e9, 16e9)
        for how in ("auto", "swap", "recompute")
    ]
    # The second finds the first's 512 tokens of 1,200.
    assert {case["prefix_hit_percent"] for case in lines} == {
        round(100 * 512 / 1200, 1)
    }
    monkeypatch.setattr("sys.argv", ["scheduling", *arguments, "--regret", "--table"])
    scheduling.main()
    out = capsys.readouterr().out
    assert [row[:12] for row in out.splitlines()] == ["| 4 GB/s | t", "| 16 GB/s | "]


def test_a_request_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="needs 44 slots, but the pool has 40"):
        simulate([request(0, 40, 5)], num_blocks=11)
