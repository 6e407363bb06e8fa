"""A paged KV cache for JAX: functional device state, attention, and an engine."""

from jaxkv.config import (
    NULL_BLOCK,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RopeScaling,
)
from jaxkv.device.attention import paged_attention
from jaxkv.device.cache import KVCache, LayerKV, copy_blocks, init_cache, write_kv
from jaxkv.engine.engine import Engine
from jaxkv.engine.llm import LLM
from jaxkv.engine.outputs import CompletionOutput, EngineStats, RequestOutput
from jaxkv.host.beam_search import BeamSearchParams
from jaxkv.host.block_hash import block_hashes
from jaxkv.host.block_pool import BlockPool
from jaxkv.host.request import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "NULL_BLOCK",
    "BeamSearchParams",
    "BlockPool",
    "CacheConfig",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "KVCache",
    "LayerKV",
    "ModelConfig",
    "RequestOutput",
    "RopeScaling",
    "SamplingParams",
    "block_hashes",
    "copy_blocks",
    "init_cache",
    "paged_attention",
    "write_kv",
]
