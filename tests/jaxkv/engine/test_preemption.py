"""Blocks run out: swap, recompute, and the choice between them, in a whole engine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.config import NULL_BLOCK
from jaxkv.device.cache import gather_blocks, init_cache
from jaxkv.engine.batch import BatchBuilder
from jaxkv.engine.runner import ModelRunner
from jaxkv.testing import scripted_engine, tiny_llama
from tests.helpers import cache_config, run_engine, token_ids
from tests.jaxkv.engine.conftest import CONFIG
from tests.low_bit import LOW_BIT, MIXED

pytestmark = pytest.mark.usefixtures("each_mode")

GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
WAYS = [
    pytest.param({"preemption": "recompute"}, id="recompute"),
    pytest.param({"preemption": "swap"}, id="swap"),
    # 300 bytes a token of 1 byte: what is swapped depends on the last block's filling.
    pytest.param({"swap_bandwidth": 3e-7, "prefill_rate": 120.0}, id="auto"),
]
SWAP_SPACE = {"swap_space": 2**-12}


def requests_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"r{i}": (rng.integers(0, 128, length).tolist(), GREEDY)
        for i, length in enumerate(lengths)
    }


@pytest.fixture(scope="module")
def undisturbed(tiny):
    """Tokens of the same requests in a pool that holds them all."""
    return token_ids(run_engine(tiny.engine(), requests_of((9, 12, 5, 7))))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("how", WAYS)
def test_no_way_of_preemption_changes_tokens(tiny, undisturbed, how, caching):
    engine = tiny.engine(
        num_blocks=16, enable_prefix_caching=caching, **SWAP_SPACE, **how
    )
    outputs = run_engine(engine, requests_of((9, 12, 5, 7)))
    assert token_ids(outputs) == undisturbed
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out_bytes > 0) == (how.get("preemption") != "recompute")
    if not caching:
        assert stats.num_swapped_in_bytes == stats.num_swapped_out_bytes
    assert (stats.held_blocks, stats.num_swapped) == (0, 0)


def step_count(engine, requests):
    for request_id, (prompt, params, priority) in requests.items():
        engine.add_request(request_id, prompt, params, priority)
    tokens, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return tokens, steps


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("how", WAYS)
def test_a_pool_hardly_larger_than_one_request_serves_sixteen(policy, how):
    rng = np.random.default_rng(1)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    requests = {
        f"r{i}": (rng.integers(3, 500, rng.integers(1, 88)).tolist(), params, int(p))
        for i, p in enumerate(rng.integers(0, 3, 16))
    }
    largest = max(len(prompt) for prompt, *_ in requests.values()) + 40 - 1
    config = dataclasses.replace(
        CONFIG,
        num_blocks=1 + -(-largest * 11 // (10 * CONFIG.block_size)),
        max_num_seqs=16,
        policy=policy,
        swap_space=2**-16,
        **how,
    )

    def next_token(tokens):
        return 3 + sum((i + 3) * t for i, t in enumerate(tokens)) % 1009

    alone = {}
    num_alone = 0
    engine = scripted_engine(next_token, config)
    for request_id, request in requests.items():
        tokens, steps = step_count(engine, {request_id: request})
        alone |= tokens
        num_alone += steps
    engine = scripted_engine(next_token, config)
    tokens, steps = step_count(engine, requests)
    assert tokens == alone
    assert steps <= 3 * num_alone
    assert engine.stats().num_preemptions > 0
    assert engine.stats().held_blocks == 0


def filled(config, seed):
    """A cache of random values in all slots, scales included."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        return jnp.asarray(rng.integers(-128, 128, x.shape).astype(x.dtype))

    return jax.tree.map(fill, init_cache(config))


def make_runner(config, cache):
    params, model_config = tiny_llama()
    builder = BatchBuilder(
        buckets=(),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=4,
        max_model_len=64,
        vocab_size=128,
    )
    runner = ModelRunner(
        params,
        model_config,
        config,
        builder,
        num_token_ids=128,
        attention_implementation="auto",
    )
    runner._cache = cache
    return runner


def blocks_of(cache, block_ids):
    """Their content as it lies in memory."""
    content = gather_blocks(cache, jnp.asarray(block_ids, jnp.int32))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(content)]


@pytest.mark.parametrize(
    ("dtype", "num_blocks"),
    [
        *((dtype, 11) for dtype in ("bfloat16", "float16", *LOW_BIT, *MIXED)),
        *(("float32", num_blocks) for num_blocks in (1, 7, 8, 11, 17)),
    ],
)
def test_a_swap_there_and_back_is_bit_exact_to_other_blocks(dtype, num_blocks):
    config = cache_config(
        num_blocks=60, kv_cache_dtype=dtype, kv_scales=((1.0, 2.0),) * 2
    )
    before = filled(config, 0)
    sources = list(range(1, num_blocks + 1))
    targets = list(range(40, 40 + num_blocks))
    expected = blocks_of(before, sources)
    others = [i for i in range(1, 60) if i not in targets]
    kept = blocks_of(before, others)
    runner = make_runner(config, before)
    content = runner.swap_out(sources)
    # Whoever gets the blocks writes to them at once.
    runner.swap_in(runner.swap_out(targets), sources)
    runner.swap_in(content, targets)
    assert blocks_of(runner._cache, targets) == expected
    runner.swap_in(content, sources)
    assert blocks_of(runner._cache, others) == kept


def test_blocks_that_are_not_wanted_back_change_nothing():
    config = cache_config(num_blocks=30)
    before = filled(config, 0)
    runner = make_runner(config, jax.tree.map(jnp.copy, before))
    content = runner.swap_out(range(1, 12))
    runner.swap_in(content, [NULL_BLOCK] * 10 + [25])
    expected = blocks_of(before, [*range(1, 25), 11, *range(26, 30)])
    assert blocks_of(runner._cache, range(1, 30)) == expected


def test_what_is_swapped_out_lies_in_pinned_memory():
    config = cache_config(num_blocks=30)
    runner = make_runner(config, filled(config, 0))
    content = runner.swap_out(range(1, 12))
    arrays = jax.tree.leaves(content)
    assert {array.sharding.memory_kind for array in arrays} == {"pinned_host"}
    assert sum(array.nbytes for array in arrays) == 11 * config.bytes_per_block


def test_rates_are_measured_unless_they_are_given(monkeypatch):
    params, model_config = tiny_llama()
    options = {"num_blocks": 32, "max_model_len": 64, "warmup": "lazy", **SWAP_SPACE}
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, **options)
    preemption = Engine.from_params(params, model_config, config).scheduler.preemption
    assert preemption.how == "auto"
    assert preemption.swap_bandwidth not in (0, 1e10)
    assert preemption.prefill_rate not in (0, 1e4)
    config = dataclasses.replace(config, swap_bandwidth=16.0, prefill_rate=500.0)
    engine = Engine.from_params(params, model_config, config)
    assert engine.scheduler.preemption.swap_bandwidth == 16e9
    assert engine.scheduler.preemption.prefill_rate == 500.0
    assert engine.stats().num_compilations == 0
    bytes_per_block = engine.scheduler.preemption.bytes_per_block
    # K and V of 2 layers, 2 heads of 8 float32.
    assert bytes_per_block == 16 * 2 * 2 * 2 * 8 * 4
    assert engine.scheduler.swap_space.num_blocks == 2**18 // bytes_per_block


def test_measuring_leaves_the_cache_as_it_was():
    params, model_config = tiny_llama()
    config = EngineConfig(
        num_blocks=32,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        warmup="lazy",
        **SWAP_SPACE,
    )
    engine = Engine.from_params(params, model_config, config)
    assert isinstance(engine._runner, ModelRunner)
    cache = engine._runner._cache
    for array in jax.tree.leaves(cache):
        assert not np.asarray(array[1:]).any()
