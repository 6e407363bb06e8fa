"""The compiled step: the cache is donated, written in place and never copied.

Read off XLA's optimised program, for this machine's CPU and for an H200.
"""

import json
import math
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_target, llama_8b
from benchmarks.hlo import PoolUse, made_of_sizes, pool_use
from jaxkv.config import CacheConfig
from jaxkv.device.cache import KVCache, LayerKV, write_kv
from jaxkv.engine.batch import BatchBuilder, Bucket
from jaxkv.engine.runner import ModelRunner
from jaxkv.testing import tiny_llama

LAYERS = 2
DECODE, PREFILL = Bucket(rows=4, tokens=4), Bucket(rows=4, tokens=64)
DTYPES = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]


def elements_of_a_pool(config):
    return math.prod(
        (config.num_blocks, config.num_kv_heads, config.block_size, config.head_dim)
    )


# --- on this machine's CPU -------------------------------------------------------


def dtypes_id(dtypes):
    return f"{dtypes[0]}-weights-{dtypes[1]}-pool"


class Tiny(NamedTuple):
    """A toy model in the engine's own runner; its pools dwarf all other arrays."""

    params: dict[str, jax.Array]
    cache_config: CacheConfig
    runner: ModelRunner
    builder: BatchBuilder


@pytest.fixture(scope="module", params=DTYPES, ids=dtypes_id)
def tiny(request):
    return make_tiny(*request.param)


def make_tiny(weights_dtype, pool_dtype, head_dim=8, num_blocks=1024):
    params, config = tiny_llama(
        num_hidden_layers=LAYERS, dtype=weights_dtype, head_dim=head_dim
    )
    cache_config = CacheConfig(
        num_layers=LAYERS,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        block_size=16,
        kv_cache_dtype=pool_dtype,
    )
    builder = BatchBuilder(
        buckets=(DECODE, PREFILL),
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_model_len=128,
        vocab_size=config.vocab_size,
    )
    runner = ModelRunner(
        params,
        config,
        cache_config,
        builder,
        num_token_ids=config.vocab_size,
        attention_implementation="xla",
    )
    return Tiny(params, cache_config, runner, builder)


def bytes_of_rows(runner):
    return sum(array.nbytes for array in jax.tree.leaves(runner._rows))


def check_compiled_step(tiny, bucket, num_steps=1):
    tiny.runner.compile([(bucket, num_steps)])
    compiled = tiny.runner._executables[bucket, num_steps]
    memory = compiled.memory_analysis()
    use = pool_use(compiled.as_text(), elements_of_a_pool(tiny.cache_config))
    bodies = min(num_steps, 2)  # the first step, and those that follow in a loop
    assert use == PoolUse(num_writes=2 * LAYERS * bodies, made=[])
    donated = tiny.cache_config.total_bytes + bytes_of_rows(tiny.runner)
    assert memory.alias_size_in_bytes == donated
    assert memory.temp_size_in_bytes < tiny.cache_config.total_bytes / (2 * LAYERS)


def test_a_compiled_decode_step_writes_every_pool_in_place_and_copies_none(tiny):
    check_compiled_step(tiny, DECODE)


@pytest.mark.parametrize("tiny", DTYPES[:1], indirect=True, ids=dtypes_id)
def test_several_decode_steps_in_one_write_every_pool_in_place_and_copy_none(tiny):
    check_compiled_step(tiny, DECODE, num_steps=3)


@pytest.mark.parametrize("tiny", DTYPES[:1], indirect=True, ids=dtypes_id)
def test_a_compiled_prefill_step_writes_every_pool_in_place_and_copies_none(tiny):
    check_compiled_step(tiny, PREFILL)


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "pool_dtype", ["int8", "fp8_e4m3:int4", "int4_asymmetric:float32"]
)
def test_a_compiled_step_makes_no_array_of_a_low_bit_pools_size(pool_dtype, bucket):
    """No float copy of codes above all, and none of the scales either."""
    tiny = make_tiny("float32", pool_dtype, head_dim=32, num_blocks=8192)
    tiny.runner.compile([(bucket, 1)])
    compiled = tiny.runner._executables[bucket, 1]
    smallest = min(x.size for x in jax.tree.leaves(tiny.runner._cache))
    assert pool_use(compiled.as_text(), smallest).made == []
    memory = compiled.memory_analysis()
    donated = tiny.cache_config.total_bytes + bytes_of_rows(tiny.runner)
    assert memory.alias_size_in_bytes == donated
    assert memory.temp_size_in_bytes < tiny.cache_config.total_bytes / (2 * LAYERS)


def decode_batch(builder, position):
    """One row that computes one token, at `position` of block 1; the rest padding."""
    batch = builder.empty(DECODE)
    batch.positions[0] = position
    batch.slot_mapping[0] = builder.block_size + position
    batch.rows[0] = 0
    batch.new_blocks[:, 0] = (0, 0, 1)  # row, place, block
    batch.kv_lens[0] = position + 1
    batch.cu_q_lens[1:] = 1
    return batch


def test_ten_steps_keep_the_pools_dtype_shape_and_place_and_spare_the_params(tiny):
    runner = tiny.runner
    before = [(x.dtype, x.shape) for x in jax.tree.leaves(runner._cache)]
    assert {str(dtype) for dtype, _ in before} == {tiny.cache_config.kv_cache_dtype}
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner._cache)]
    for position in range(10):
        donated = jax.tree.leaves((runner._cache, runner._rows))
        runner.collect(runner.dispatch(decode_batch(tiny.builder, position)))
        pools = jax.tree.leaves(runner._cache)
        assert all(x.is_deleted() for x in donated)
        assert [(x.dtype, x.shape) for x in pools] == before
        assert [x.unsafe_buffer_pointer() for x in pools] == places
    for pool in pools:
        used = np.any(np.asarray(pool, np.float32) != 0, axis=(1, 3))
        assert np.flatnonzero(used[1:]).tolist() == list(range(10))
    params = [*tiny.params.values(), *runner._params]
    assert not any(x.is_deleted() for x in params)


@pytest.mark.slow
def test_ten_steps_do_the_same_with_x64_enabled():
    test = test_ten_steps_keep_the_pools_dtype_shape_and_place_and_spare_the_params
    name = f"{__file__}::{test.__name__}[{dtypes_id(DTYPES[0])}]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
        cwd=gpu_target.ROOT,
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- for an H200, without one ----------------------------------------------------

BUDGET = json.loads((gpu_target.ROOT / "tests/pallas_kernels/budget.json").read_text())


@pytest.mark.gpu_compile
@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_an_h200_decodes_llama_8b_with_every_pool_in_place_and_none_copied(
    implementation,
):
    step = gpu_target.call(llama_8b.decode_step, rows=64, implementation=implementation)
    config = llama_8b.cache_config()
    use = pool_use(step["text"], elements_of_a_pool(config))
    assert use == PoolUse(num_writes=2 * config.num_layers, made=[])
    assert step["alias_bytes"] == step["donated_bytes"] > config.total_bytes
    # The float32 [64, 128256] logits are 33 MB of them; the rest are tiles of those.
    assert step["temp_bytes"] < 64e6
    num_kernels = step["text"].count('custom_call_target="mosaic_gpu')
    assert num_kernels == (config.num_layers if implementation == "auto" else 0)
    if jax.__version__ not in BUDGET:
        pytest.skip(f"budget.json has no figures for jax {jax.__version__}")
    budget = BUDGET[jax.__version__]["llama-3.1-8b decode step, 64 rows"]
    assert step["temp_bytes"] <= budget["temporaries"]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("kv_cache_dtype", "implementation"),
    [("int8", "xla"), ("int8", "auto"), ("fp8_e4m3", "auto"), ("int4", "auto")],
)
def test_an_h200_decodes_from_a_low_bit_cache_without_a_copy_of_it(
    kv_cache_dtype, implementation
):
    changes = {"num_layers": 2, "kv_cache_dtype": kv_cache_dtype}
    step = gpu_target.call(
        llama_8b.decode_step, rows=64, implementation=implementation, **changes
    )
    config = llama_8b.cache_config(**changes)
    made = pool_use(step["text"], elements_of_a_pool(config) // 2).made
    assert made == []
    assert step["alias_bytes"] == step["donated_bytes"] > config.total_bytes
    assert step["temp_bytes"] < 64e6
    num_kernels = step["text"].count('custom_call_target="mosaic_gpu')
    assert num_kernels == (2 if implementation == "auto" else 0)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("rows", [1, 256])
def test_an_h200_makes_no_other_array_of_a_weight_and_writes_k_and_v_once(rows):
    step = gpu_target.call(llama_8b.decode_step, rows=rows, num_layers=2)
    assert made_of_sizes(step["text"], llama_8b.weight_sizes(2)) == []
    use = pool_use(step["text"], elements_of_a_pool(llama_8b.cache_config()))
    assert use == PoolUse(num_writes=2 * 2, made=[])
    # One CUDA graph: the host launches it and waits for nothing.
    assert step["launches"] == ["kCommandBuffer"]


def with_other_weights(change):
    """A step that first makes other arrays of its two-dimensional weights."""

    def make(step):
        def changed(params, *others):
            params = tuple(change(x) if x.ndim == 2 else x for x in params)
            return step(params, *others)

        return changed

    return make


def behind_a_barrier(change, undo):
    return lambda x: undo(jax.lax.optimization_barrier(change(x)))


def writes_twice(step):
    def changed(params, cache, rows, batch):
        output, cache, rows = step(params, cache, rows, batch)
        new = jnp.ones((batch.slot_mapping.size, 8, 128), jnp.bfloat16)
        layers = write_kv(cache, 0, new, new, batch.slot_mapping).layers
        return output, KVCache(layers=layers), rows

    return changed


FAULTY_STEPS = {
    "weights in float32": with_other_weights(
        behind_a_barrier(lambda x: x.astype("float32"), lambda x: x.astype("bfloat16"))
    ),
    "weights transposed": with_other_weights(
        lambda x: behind_a_barrier(
            lambda x: x.T.ravel(), lambda y: y.reshape(x.shape[::-1]).T
        )(x)
    ),
    "weights copied": with_other_weights(
        behind_a_barrier(lambda x: x[::-1], lambda x: x[::-1])
    ),
    "k and v written twice": writes_twice,
}


def faulty_step(fault):
    return llama_8b.decode_step(rows=4, num_layers=1, change=FAULTY_STEPS[fault])


@pytest.mark.gpu_compile
@pytest.mark.parametrize("fault", FAULTY_STEPS)
def test_a_step_for_an_h200_with_a_fault_is_seen(fault):
    text = gpu_target.call(faulty_step, fault=fault)["text"]
    if fault.startswith("weights"):
        # A layer has seven; the embedding and the head may be made in parts.
        assert len(made_of_sizes(text, llama_8b.weight_sizes(1))) >= 7
    else:
        elements = elements_of_a_pool(llama_8b.cache_config())
        assert pool_use(text, elements).num_writes == 4


@pytest.mark.parametrize("found", [None, "0.11.1"])
def test_a_missing_or_unequal_cuda_plugin_is_a_clear_error(found, tmp_path):
    if found:
        folder = tmp_path / f"jax_cuda13_plugin-{found}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: jax-cuda13-plugin\nVersion: {found}\n")
    message = f"needs jax-cuda13-plugin 0.11.2, .* found {found}: .*`make test-gpu"
    with pytest.raises(RuntimeError, match=message):
        gpu_target.check_plugin("0.11.2", [str(tmp_path)])


# --- planted faults: what the checks above would see ------------------------------

POOL_SHAPE = (1024, 2, 16, 8)
POOL_ELEMENTS = math.prod(POOL_SHAPE)


def write_all(cache, new, slots):
    for layer in range(len(cache.layers)):
        cache = write_kv(cache, layer, new, new, slots)
    return cache


def on_first_k(change):
    """A step that does `change` to one layer's keys, beside what it should do."""

    def step(cache, new, slots):
        first, *others = write_all(cache, new, slots).layers
        changed = first._replace(k=change(first.k, new, slots))
        return KVCache(layers=(changed, *others))

    return step


def through_another_layout(k, new, slots):
    swapped = k.swapaxes(1, 2)
    return swapped.at[slots // 16, slots % 16].set(new).swapaxes(1, 2)


def reads_the_whole_pool(cache, new, slots):
    pool = cache.layers[0].k[jnp.arange(POOL_SHAPE[0])[::-1]]
    return write_all(cache, new, slots), jnp.einsum("bhtd,nhd->nbht", pool, new)


def stacks_k_and_v(cache, new, slots):
    layers = []
    for old in cache.layers:
        both = jnp.stack(old).at[:, slots // 16, :, slots % 16].set(new[:, None])
        layers.append(LayerKV(k=both[0], v=both[1]))
    return KVCache(layers=tuple(layers))


def swaps_layers(cache, new, slots):
    return KVCache(layers=write_all(cache, new, slots).layers[::-1])


def scans_stacked_layers(cache, new, slots):
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cache.layers)

    def one_layer(carry, layer):
        return carry, write_kv(KVCache(layers=(layer,)), 0, new, new, slots).layers[0]

    _, stacked = jax.lax.scan(one_layer, None, stacked)
    return KVCache(
        layers=tuple(LayerKV(k=stacked.k[i], v=stacked.v[i]) for i in range(2))
    )


FAULTS = {
    "scaled": on_first_k(lambda k, new, slots: k * 2),
    "selected": on_first_k(
        lambda k, new, slots: jnp.where(k > 0, k, jnp.zeros_like(k))
    ),
    "emptied": on_first_k(lambda k, new, slots: jnp.zeros_like(k)),
    "converted": on_first_k(
        lambda k, new, slots: jnp.sin(k.astype("bfloat16")).astype(k.dtype)
    ),
    # jax does not even warn: a result has as many elements as the donated array.
    "other-dtype": on_first_k(lambda k, new, slots: k.astype("bfloat16")),
    "other-layout": on_first_k(through_another_layout),
    "whole-pool-read": reads_the_whole_pool,
    "k-and-v-stacked": stacks_k_and_v,
    "layers-swapped": swaps_layers,
    "layers-scanned": scans_stacked_layers,
}


def write_arguments():
    pool = jax.ShapeDtypeStruct(POOL_SHAPE, jnp.float32)
    return (
        KVCache(layers=(LayerKV(k=pool, v=pool),) * 2),
        jax.ShapeDtypeStruct((4, 2, 8), jnp.float32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )


def compile_write(step, donate_argnums=(0,)):
    jitted = jax.jit(step, donate_argnums=donate_argnums)
    return jitted.lower(*write_arguments()).compile()


def faulty_steps_on_an_h200():
    """Compile the faults for an H200; a swap of axes is none there, but a bitcast."""
    return {
        name: gpu_target.compile_for_h200(
            step, *write_arguments(), donate_argnums=(0,)
        ).as_text()
        for name, step in FAULTS.items()
        if name != "other-layout"
    }


def test_a_step_without_a_fault_is_clean():
    compiled = compile_write(write_all)
    assert pool_use(compiled.as_text(), POOL_ELEMENTS) == PoolUse(4, [])
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * 4 * POOL_ELEMENTS


def test_an_undonated_cache_is_seen():
    compiled = compile_write(write_all, donate_argnums=())
    made = pool_use(compiled.as_text(), POOL_ELEMENTS).made
    assert [line.split()[0] for line in made] == ["copy"] * 4
    assert compiled.memory_analysis().alias_size_in_bytes == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_makes_an_array_of_a_pools_size_is_seen(fault):
    assert pool_use(compile_write(FAULTS[fault]).as_text(), POOL_ELEMENTS).made


@pytest.mark.gpu_compile
def test_the_faults_are_seen_on_an_h200_too():
    texts = gpu_target.call(faulty_steps_on_an_h200)
    assert [x for x in texts if not pool_use(texts[x], POOL_ELEMENTS).made] == []
    assert len(texts) == len(FAULTS) - 1


@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[8,2,16,8]{3,2,1,0} copy(%p)",
        "%x = (f32[8,2,16,8]{3,2,1,0}, f32[8,2,16,8]{3,2,1,0}, u32[]) copy-start(%p)",
        "%x = f32[8,2,16,8]{3,2,1,0} copy-done(%y)",
        "%x = f32[8,16,2,8]{3,2,1,0} transpose(%p), dimensions={0,2,1,3}",
        "%x = bf16[8,2,16,8]{3,2,1,0:T(8,128)(2,1)} convert(%p)",
        "%x = f32[2,8,2,16,8]{4,3,2,1,0} concatenate(%p, %p), dimensions={0}",
        "%x = (s32[], /*index=1*/f32[8,2,16,8]{3,2,1,0}) custom-call(%p)",
        "%x = f32[8,2,16,8]{3,2,1,0} fusion(%p), kind=kLoop, calls=%copies",
        "%x = f32[8,2,16,8]{3,2,1,0} fusion(%p), kind=kLoop, calls=%scatters_a_copy",
    ],
)
def test_hlo_that_makes_an_array_of_a_pools_size_is_seen(line):
    text = f"""
%copies (a: f32[8,2,16,8]) -> f32[8,2,16,8] {{
  %a = f32[8,2,16,8]{{3,2,1,0}} parameter(0)
  ROOT %b = f32[8,2,16,8]{{3,2,1,0}} copy(%a)
}}

%scatters_a_copy (a: f32[8,2,16,8]) -> f32[8,2,16,8] {{
  %a = f32[8,2,16,8]{{3,2,1,0}} parameter(0)
  %c = f32[8,2,16,8]{{3,2,1,0}} negate(%a)
  ROOT %b = f32[8,2,16,8]{{3,2,1,0}} scatter(%c, %i, %u), to_apply=%region
}}

ENTRY %main (p: f32[8,2,16,8]) -> f32[] {{
  %p = f32[8,2,16,8]{{3,2,1,0}} parameter(0)
  %small = f32[8]{{0}} copy(%q)
  %in_a_fusion = f32[] fusion(%p), kind=kLoop, calls=%copies
  %in_another = f32[] fusion(%p), kind=kLoop, calls=%scatters_a_copy
  {line}
}}
"""
    use = pool_use(text, 8 * 2 * 16 * 8)
    assert use.num_writes == 0
    assert [x.split()[1] for x in use.made] == ["%x"]


def test_a_donated_cache_that_no_result_can_reuse_is_an_error():
    def shrinks(cache, new, slots):
        return jax.tree.map(lambda x: x[1:], write_all(cache, new, slots))

    with pytest.raises(UserWarning, match="donated buffers were not usable"):
        compile_write(shrinks)
