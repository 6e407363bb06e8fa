import jax
import numpy as np
import pytest

from jaxkv import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jaxkv.engine.batch import few_buckets, make_buckets
from jaxkv.testing import tiny_llama
from tests.helpers import run_engine

LIMITS = {"num_blocks": 64, "max_model_len": 128, "block_size": 4}


@pytest.fixture
def backend_compilations():
    """A list that grows with every compilation of anything, by whatever name."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("multi_step", [1, 2])
def test_after_eager_warm_up_nothing_compiles_whatever_is_asked_for(
    backend_compilations, multi_step
):
    params, model_config = tiny_llama()
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, multi_step=multi_step, **LIMITS
    )
    engine = Engine.from_params(params, model_config, config)
    # 1, 2 and 4 rows, and these again for two steps in one; 8, 16 and 32 tokens;
    # setting rows, their history; copying blocks.
    num_compilations = 9 if multi_step == 1 else 12
    assert engine.stats().num_compilations == num_compilations
    assert len(backend_compilations) >= 6  # jax may know the copying from before
    backend_compilations.clear()
    rng = np.random.default_rng(0)
    kinds = [
        {"temperature": 0.0},
        {"seed": 1, "top_k": 3, "top_p": 0.8, "min_p": 0.1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "logprobs": 5},
        {"prompt_logprobs": 3, "min_tokens": 2, "stop_token_ids": [1, 2]},
        {"n": 3},
    ]
    requests = {
        str(index): (
            rng.integers(0, 128, rng.integers(1, 90)).tolist(),
            SamplingParams(max_tokens=int(rng.integers(1, 20)), **kinds[index % 5]),
        )
        for index in range(25)
    }
    one_token = SamplingParams(max_tokens=1, logprobs=0)
    full_length = SamplingParams(max_tokens=None, ignore_eos=True)
    requests |= {
        "one token": ([1], one_token),
        "full length": ([2], full_length),
        "longest prompt": ([3] * 127, full_length),
        "beams": ([4] * 9, BeamSearchParams(beam_width=3, max_tokens=4)),
    }
    assert len(run_engine(engine, requests)) == 29
    assert engine.stats().num_compilations == num_compilations
    assert backend_compilations == []


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_b138_serving_in_another_mesh_than_warm_up_compiles_nothing(
    backend_compilations, async_scheduling
):
    params, model_config = tiny_llama()
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        async_scheduling=async_scheduling,
        **LIMITS,
    )
    axis_types = (jax.sharding.AxisType.Auto,)
    meshes = [jax.make_mesh((1,), (name,), axis_types=axis_types) for name in "xy"]
    with jax.set_mesh(meshes[0]):
        engine = Engine.from_params(params, model_config, config)
    num_compilations = engine.stats().num_compilations
    rng = np.random.default_rng(0)
    requests = {
        str(length): (
            rng.integers(0, 128, length).tolist(),
            SamplingParams(max_tokens=3, seed=length, logprobs=length % 3),
        )
        for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
    }
    backend_compilations.clear()
    expected = run_engine(engine, requests)
    for mesh in meshes:
        with jax.set_mesh(mesh):
            found = run_engine(engine, requests)
        for key, output in expected.items():
            assert found[key].outputs[0].token_ids == output.outputs[0].token_ids
    assert engine.stats().num_compilations == num_compilations
    assert backend_compilations == []


def test_after_eager_warm_up_swapping_compiles_nothing(backend_compilations):
    params, model_config = tiny_llama()
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        preemption="swap",
        swap_space=2**-10,
        **(LIMITS | {"num_blocks": 16}),
    )
    engine = Engine.from_params(params, model_config, config)
    assert engine.stats().num_compilations == 9 + 4  # out and in, by 8 and by 1
    backend_compilations.clear()
    rng = np.random.default_rng(0)
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    requests = {str(i): (rng.integers(0, 128, 9).tolist(), greedy) for i in range(4)}
    run_engine(engine, requests)
    assert engine.stats().num_swapped_in_bytes > 0
    assert engine.stats().num_compilations == 9 + 4
    assert backend_compilations == []


def test_lazy_warm_up_compiles_each_bucket_once_on_first_use():
    params, model_config = tiny_llama()
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=32, warmup="lazy", **LIMITS
    )
    engine = Engine.from_params(params, model_config, config)
    assert engine.stats().num_compilations == 0
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    run_engine(engine, {"a": ([1, 2, 3], greedy)})
    assert engine.stats().num_compilations == 3  # rows; 3 tokens, then 1 row
    run_engine(engine, {"b": ([4, 5, 6], greedy)})
    assert engine.stats().num_compilations == 3


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "expected"),
    [
        (1, 1, [(1, 1)]),
        (4, 4, [(1, 1), (2, 2), (4, 4)]),
        (3, 9, [(1, 1), (2, 2), (4, 4), (4, 8), (4, 16)]),
        (20, 24, [*((n, n) for n in (1, 2, 4, 8)), (8, 16), (16, 16), (24, 24)]),
        (
            20,
            64,
            [
                *((n, n) for n in (1, 2, 4, 8)),
                *((8, 16), (16, 16), (24, 24), (24, 32), (24, 64)),
            ],
        ),
        (
            49,
            97,
            [
                *((n, n) for n in (1, 2, 4, 8)),
                *((8, 16), (16, 16), (24, 24), (16, 32), (32, 32), (48, 48)),
                *((32, 64), (64, 64), (64, 128)),
            ],
        ),
    ],
)
def test_buckets_hold_every_step(max_num_seqs, max_num_batched_tokens, expected):
    assert list(make_buckets(max_num_seqs, max_num_batched_tokens)) == expected


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "expected"),
    [
        (1, 1, [(1, 1)]),
        (8, 8, [(1, 1), (2, 2), (4, 4), (8, 8)]),
        (9, 16, [*((n, n) for n in (1, 2, 4, 8, 9)), (9, 16)]),
        (
            32,
            256,
            [*((n, n) for n in (1, 2, 4, 8, 16, 32)), (32, 64), (32, 128), (32, 256)],
        ),
        (
            50,
            100,
            [*((n, n) for n in (1, 2, 4, 8, 16, 32, 50)), (50, 64), (50, 128)],
        ),
    ],
)
def test_few_buckets_hold_every_step_too(
    max_num_seqs, max_num_batched_tokens, expected
):
    assert list(few_buckets(max_num_seqs, max_num_batched_tokens)) == expected


@pytest.mark.parametrize(
    ("skips", "changes", "expected"),
    [
        (True, {}, few_buckets),
        (False, {}, make_buckets),
        (True, {"kv_cache_dtype": "int8"}, make_buckets),
        (True, {"attention_implementation": "xla"}, make_buckets),
    ],
    ids=["padding skipped", "padding computed", "low-bit", "attention by XLA"],
)
def test_buckets_are_few_where_neither_products_nor_attention_compute_padding(
    skips, changes, expected, monkeypatch
):
    monkeypatch.setattr("jaxkv.engine.engine.skips_padding", lambda dtype: skips)
    params, model_config = tiny_llama()
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=64, warmup="lazy", **LIMITS, **changes
    )
    engine = Engine.from_params(params, model_config, config)
    assert few_buckets(16, 64) != make_buckets(16, 64)
    assert engine._builder.buckets == expected(16, 64)
