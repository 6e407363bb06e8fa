"""Llama-3.1-8B's step, compiled for an H200 that need not be there."""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks import gpu_target
from jaxkv.config import CacheConfig, ModelConfig, RopeScaling
from jaxkv.device.cache import init_cache
from jaxkv.device.llama import param_shapes
from jaxkv.device.rows import init_rows
from jaxkv.device.step import GPU_COMPILER_OPTIONS, Step, make_step
from jaxkv.engine.batch import BatchBuilder, Bucket

NUM_LAYERS = 32
MAX_MODEL_LEN = 8192


def model_config(num_layers: int = NUM_LAYERS) -> ModelConfig:
    """Return the model's config, of bfloat16 weights."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(rope_type="llama3", factor=8.0),
        dtype="bfloat16",
    )


def cache_config(
    num_layers: int = NUM_LAYERS,
    kv_cache_dtype: str = "bfloat16",
    num_blocks: int = 8192,
) -> CacheConfig:
    """Return a cache's config for that model."""
    return CacheConfig(
        num_layers=num_layers,
        num_kv_heads=8,
        head_dim=128,
        num_blocks=num_blocks,
        kv_cache_dtype=kv_cache_dtype,
    )


def weight_sizes(num_layers: int = NUM_LAYERS) -> set[int]:
    """Return the elements of each matrix, and of those that share their input."""
    model = model_config(num_layers)
    matrices = [shape for shape in param_shapes(model).values() if len(shape) == 2]
    sizes = {math.prod(shape) for shape in matrices}
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    sizes.add(heads * model.head_dim * model.hidden_size)
    return sizes | {2 * model.intermediate_size * model.hidden_size}


def decode_step(
    rows: int,
    implementation: str = "auto",
    change: Callable[[Step], Callable] | None = None,
    **cache_changes,
) -> dict:
    """Compile the decoding step of so many rows; for `gpu_target.call`.

    Args:
        rows: Of the batch; all that the engine has.
        implementation: Of attention.
        change: What to do to the step first, for tests.
        **cache_changes: Arguments of `cache_config`.

    Returns:
        The optimised module's text; what the host launches, by XLA's names: a
        "kCommandBuffer" is a CUDA graph; and bytes: those that outputs share with
        donated arguments, those of the donated ones, and temporaries.
    """
    config = cache_config(**cache_changes)
    model = model_config(config.num_layers)
    bucket = Bucket(rows=rows, tokens=rows)
    builder = BatchBuilder(
        buckets=(bucket,),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_num_seqs=rows,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=model.vocab_size,
    )
    params = tuple(
        jax.ShapeDtypeStruct(shape, model.dtype)
        for shape in param_shapes(model).values()
    )
    cache = jax.eval_shape(lambda: init_cache(config))
    row_state = jax.eval_shape(
        lambda: init_rows(rows, builder.table_width, MAX_MODEL_LEN, builder.vocab_size)
    )
    step = make_step(
        model,
        num_token_ids=model.vocab_size,
        attention_implementation=implementation,
    )
    arguments = (params, cache, row_state, builder.empty(bucket))
    with tempfile.TemporaryDirectory() as folder:
        compiled = gpu_target.compile_for_h200(
            change(step) if change else step,
            *arguments,
            donate_argnums=(1, 2),
            compiler_options={**GPU_COMPILER_OPTIONS, "xla_dump_to": folder},
        )
        [listing] = Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt")
        launches = re.findall(r"^\d+: (\w+)", listing.read_text(), re.MULTILINE)
    memory = compiled.memory_analysis()
    assert memory is not None
    donated = jax.tree.leaves((cache, row_state))
    return {
        "text": compiled.as_text(),
        "launches": launches,
        "alias_bytes": memory.alias_size_in_bytes,
        "donated_bytes": sum(x.size * x.dtype.itemsize for x in donated),
        "temp_bytes": memory.temp_size_in_bytes,
    }
