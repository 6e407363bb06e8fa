"""One tiny model, compiled once, for every engine test."""

import dataclasses

import pytest

from jaxkv.config import CacheConfig, EngineConfig
from jaxkv.engine.checks import EngineLimits
from jaxkv.engine.engine import Engine, make_builder
from jaxkv.engine.runner import ModelRunner
from jaxkv.testing import tiny_llama

NUM_BLOCKS = 64
MAX_ROWS = 32  # of any engine
CONFIG = EngineConfig(
    num_blocks=NUM_BLOCKS,
    block_size=4,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    warmup="lazy",
    debug_blocks=True,
)


class TinyModel:
    """The toy model, and engines around one runner of it.

    The runner's cache is not emptied between engines: what it holds must not matter.
    """

    async_scheduling = True  # where nothing else is said

    def __init__(self, kv_cache_dtype="float32", head_dim=8, **cache_changes):
        self.params, self.config = tiny_llama(eos_token_ids=(7,), head_dim=head_dim)
        largest = dataclasses.replace(CONFIG, max_num_seqs=MAX_ROWS)
        self.runner = ModelRunner(
            self.params,
            self.config,
            CacheConfig(
                num_layers=self.config.num_hidden_layers,
                num_kv_heads=self.config.num_key_value_heads,
                head_dim=self.config.head_dim,
                num_blocks=NUM_BLOCKS,
                block_size=CONFIG.block_size,
                kv_cache_dtype=kv_cache_dtype,
                dtype="float32",
                **cache_changes,
            ),
            make_builder(self.limits(largest), largest),
            num_token_ids=self.config.vocab_size,
            attention_implementation="auto",
        )

    def engine(self, tokenizer=None, eos_token_ids=None, **changes):
        """An engine; `changes` are fields of EngineConfig."""
        changes = {"async_scheduling": self.async_scheduling} | changes
        config = dataclasses.replace(CONFIG, **changes)
        limits = self.limits(config, eos_token_ids)
        builder = make_builder(limits, config)
        return Engine(self.runner, builder, limits, config, tokenizer)

    def limits(self, config, eos_token_ids=None):
        return EngineLimits(
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            vocab_size=self.config.vocab_size,
            num_token_ids=self.config.vocab_size,
            eos_token_ids=(
                self.config.eos_token_ids if eos_token_ids is None else eos_token_ids
            ),
            kv_bytes_per_token=1,
        )


@pytest.fixture(scope="session")
def tiny():
    return TinyModel()


@pytest.fixture(params=[True, False], ids=["async", "in-turns"])
def each_mode(request, tiny, monkeypatch):
    """Run a test twice; its engines schedule asynchronously, or in turns."""
    monkeypatch.setattr(tiny, "async_scheduling", request.param)
    config = dataclasses.replace(CONFIG, async_scheduling=request.param)
    monkeypatch.setattr(request.module, "CONFIG", config)
