"""Engines whose K and V are stored in few bits: the same tokens by every way."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.device.codec import Quantized
from jaxkv.testing import tiny_llama
from tests.helpers import run_engine, token_ids
from tests.jaxkv.engine.conftest import CONFIG, TinyModel

# head_dim 40 has a group of 32 and one of 8.
FORMATS = {
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3:fp8_e5m2"},
    "fp8 static": {
        "kv_cache_dtype": "fp8_e4m3_static",
        "kv_scales": ((0.01, 0.02), (0.03, 0.01)),
    },
    "int4 rotated": {"kv_cache_dtype": "int4", "rotation": True},
    "mixed": {"kv_cache_dtype": "int8:int4_asymmetric", "skip_layers": (1,)},
}
LENGTHS = (1, 4, 17, 33)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=FORMATS)
def low_bit(request):
    return TinyModel(head_dim=40, **FORMATS[request.param])


@pytest.fixture(scope="module")
def expected(low_bit):
    """Tokens of each request, alone in a pool."""
    return {
        name: token_ids(run_engine(low_bit.engine(), {name: request}))[name]
        for name, request in requests().items()
    }


def requests():
    rng = np.random.default_rng(0)
    return {f"r{n}": (rng.integers(0, 128, n).tolist(), GREEDY) for n in LENGTHS}


def test_batching_does_not_change_tokens(low_bit, expected):
    assert token_ids(run_engine(low_bit.engine(), requests())) == expected


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16, 32])
def test_no_chunk_size_changes_tokens(low_bit, expected, chunk):
    engine = low_bit.engine(long_prefill_token_threshold=chunk)
    assert token_ids(run_engine(engine, requests())) == expected


@pytest.mark.parametrize("how", [{"preemption": "recompute"}, {"swap_space": 2**-12}])
def test_preemption_does_not_change_tokens(low_bit, expected, how):
    engine = low_bit.engine(num_blocks=13, **({"preemption": "swap"} | how))
    assert token_ids(run_engine(engine, requests())) == expected
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in_bytes > 0) == ("swap_space" in how)


def test_prefix_hits_and_forks_do_not_change_tokens(low_bit, expected):
    engine = low_bit.engine()
    params = dataclasses.replace(GREEDY, n=3, temperature=1.0, top_k=1)
    prompt = requests()["r33"][0]
    forked = run_engine(engine, {"n": (prompt, params)})["n"]
    assert [list(out.token_ids) for out in forked.outputs] == 3 * [expected["r33"]]
    hit = run_engine(engine, {"again": (prompt, GREEDY)})["again"]
    assert hit.num_cached_tokens == 32
    assert list(hit.outputs[0].token_ids) == expected["r33"]


def test_a_pool_filled_to_the_last_slot(low_bit, expected):
    """12 blocks of 4 tokens: the last generated one needs no slot."""
    prompt = requests()["r33"][0]
    params = dataclasses.replace(GREEDY, max_tokens=48 + 1 - 33)
    engine = low_bit.engine(num_blocks=13, enable_prefix_caching=False)
    tokens = token_ids(run_engine(engine, {"full": (prompt, params)}))["full"]
    assert tokens[:10] == expected["r33"]
    assert engine.stats().peak_held_blocks == engine.stats().total_blocks
    wide = low_bit.engine(num_blocks=60)
    assert token_ids(run_engine(wide, {"wide": (prompt, params)}))["wide"] == tokens


# Through the config


def engine_of(params, model_config, **changes):
    config = EngineConfig(
        num_blocks=32,
        block_size=4,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        warmup="lazy",
        **changes,
    )
    return Engine.from_params(params, model_config, config)


def cache_of(engine):
    return engine._runner._cache


def logprobs_of(engine, prompt):
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    output = run_engine(engine, {"r": (prompt, params)})["r"]
    return output.outputs[0].logprobs[0]


def test_b58_the_pool_is_what_was_asked_for_and_its_scales_are_used():
    """Logits near those of float32, and not the same; nearer with more bits."""
    params, model_config = tiny_llama(head_dim=32)
    prompt = list(range(3, 40))
    exact = logprobs_of(engine_of(params, model_config), prompt)
    errors = []
    for kv_cache_dtype, dtype in (("int8", "int8"), ("int4", "uint8")):
        engine = engine_of(params, model_config, kv_cache_dtype=kv_cache_dtype)
        leaves = itertools.chain(*cache_of(engine).layers)
        assert {str(stored.codes.dtype) for stored in leaves} == {dtype}
        got = logprobs_of(engine, prompt)
        written = cache_of(engine).layers[0].k.scales
        assert len(np.unique(np.asarray(written.astype("float32")))) > 30
        errors.append(max(abs(got[t] - exact[t]) for t in got.keys() & exact.keys()))
    assert 0 < errors[0] < 0.02 < errors[1] < 0.5


def test_b58_newer_scales_of_a_slot_are_the_ones_that_are_used():
    """A pool's blocks are reused for vectors of another size, without a trace."""
    params, model_config = tiny_llama(head_dim=32)
    engine = engine_of(params, model_config, kv_cache_dtype="int8")
    first = logprobs_of(engine, list(range(3, 40)))
    engine.reset_prefix_cache()
    for start in range(40, 60):
        logprobs_of(engine, [start] * 50)
    engine.reset_prefix_cache()
    assert logprobs_of(engine, list(range(3, 40))) == first


def test_planned_and_allocated_bytes_are_equal():
    params, model_config = tiny_llama(head_dim=40)
    for kv_cache_dtype in ("int8", "int4_asymmetric:fp8_e4m3"):
        engine = engine_of(
            params,
            model_config,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_skip_layers=(0,),
        )
        planned = 32 * 4 * engine.limits.kv_bytes_per_token
        assert sum(x.nbytes for x in jax.tree.leaves(cache_of(engine))) == planned


def test_skipped_layers_keep_the_models_dtype():
    params, model_config = tiny_llama(dtype="bfloat16")
    engine = engine_of(
        params, model_config, kv_cache_dtype="int8:auto", kv_cache_skip_layers=(1,)
    )
    first, second = cache_of(engine).layers
    assert isinstance(first.k, Quantized)
    assert {str(x.dtype) for x in (first.v, *second)} == {"bfloat16"}


def test_calibrated_scales_are_those_of_the_checkpoint():
    params, model_config = tiny_llama(kv_scales=((0.5, 0.25), None))
    engine = engine_of(
        params,
        model_config,
        kv_cache_dtype="fp8_e4m3_static",
        kv_cache_skip_layers=(1,),
    )
    first, _ = cache_of(engine).layers
    assert (first.k.format.scale, first.v.format.scale) == (0.5, 0.25)
    assert first.k.scales is None
    with pytest.raises(ValueError, match=r"layers \[1\] have none"):
        engine_of(params, model_config, kv_cache_dtype="fp8_e4m3_static")


def test_b64_calibrated_scales_that_are_not_used_are_named(caplog):
    params, model_config = tiny_llama(kv_scales=((0.5, 0.25), (1.0, 2.0)))
    engine_of(
        params,
        model_config,
        kv_cache_dtype="fp8_e4m3_static:int8",
        kv_cache_skip_layers=(1,),
    )
    (message,) = caplog.messages
    assert message == (
        "kv_cache_dtype 'fp8_e4m3_static:int8' does not use calibrated scales of the "
        "model: v_scale of layer 0, k_scale of layer 1, v_scale of layer 1"
    )
    caplog.clear()
    engine_of(params, model_config, kv_cache_dtype="fp8_e5m2_static")
    assert not caplog.messages


def test_blocks_of_other_formats_have_other_digests():
    params, model_config = tiny_llama()
    digests = set()
    for changes in (
        {},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_dtype": "int4", "kv_cache_rotation": True},
        {"kv_cache_dtype": "int4", "kv_cache_skip_layers": (0,)},
    ):
        engine = engine_of(params, model_config, **changes)
        logprobs_of(engine, list(range(3, 13)))
        pool = engine.scheduler.pool
        assert pool.num_cached == 2
        digests.add(pool.root)
    assert len(digests) == 5


def test_a_low_bit_pool_holds_more_requests():
    params, model_config = tiny_llama(head_dim=64)
    sizes = {
        name: engine_of(
            params, model_config, kv_cache_dtype=name
        ).limits.kv_bytes_per_token
        for name in ("float32", "bfloat16", "int8", "int4")
    }
    assert sizes["bfloat16"] / sizes["int8"] == 128 / 68
    assert sizes["bfloat16"] / sizes["int4"] == 128 / 36
    assert CONFIG.kv_cache_dtype == "auto"
