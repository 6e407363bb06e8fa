"""Static facts, frozen and validated: the model, the cache, the engine.

`ModelConfig` keeps Hugging Face's names; `CacheConfig` is what the cache alone
needs. All are hashable, so they can be static arguments of a jitted function, and
nothing ever changes one after construction. Derived facts are properties.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from jaxkv.kv_format import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    KVFormat,
    has_4_bits,
    has_static_scale,
    make_kv_format,
    split_kv_cache_dtype,
)

RopeType = Literal["linear", "llama3"]
NULL_BLOCK = 0
"""The padding block: never allocated, written and read by padding only."""

DTYPES = ("float32", "bfloat16", "float16")
"""What parameters and arithmetic may be."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive_int(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _require_positive_real(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def _require_keys(cls: Any, values: dict[str, Any], where: str) -> None:
    """Check that the values are fields of a dataclass, and all it requires."""
    fields = dataclasses.fields(cls)
    unknown = sorted(set(values) - {field.name for field in fields})
    _require(not unknown, f"unknown keys in {where}: {unknown}")
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    missing = sorted(required - set(values))
    _require(not missing, f"keys missing from {where}: {missing}")


def _check_kv_format(
    kv_cache_dtype: str, skip_layers: object, rotation: object, prefix: str = ""
) -> None:
    """Check how K and V are to be stored, as far as it needs no model."""
    split_kv_cache_dtype(kv_cache_dtype)
    _require(
        isinstance(skip_layers, tuple)
        and all(type(layer) is int and layer >= 0 for layer in skip_layers),
        f"{prefix}skip_layers must be a tuple of layer indices, got {skip_layers!r}",
    )
    _require(
        isinstance(rotation, bool),
        f"{prefix}rotation must be True or False, got {rotation!r}",
    )
    _require(
        not rotation or has_4_bits(kv_cache_dtype),
        f"{prefix}rotation is for vectors of 4 bits, and kv_cache_dtype "
        f"{kv_cache_dtype!r} has none",
    )


def _check_kv_scales(kv_scales: object, num_layers: int) -> None:
    """Check calibrated scales: none, or for each layer two floats or None."""
    if kv_scales == ():
        return
    _require(
        isinstance(kv_scales, tuple)
        and len(kv_scales) == num_layers
        and any(pair is not None for pair in kv_scales),
        f"kv_scales must be empty or a tuple of {num_layers} entries, one a layer and "
        f"not all None, got {kv_scales!r}",
    )
    assert isinstance(kv_scales, tuple)
    for layer, pair in enumerate(kv_scales):
        good = pair is None or (
            isinstance(pair, tuple)
            and len(pair) == 2
            and all(
                isinstance(x, float) and SMALLEST_SCALE <= x <= LARGEST_SCALE
                for x in pair
            )
        )
        _require(
            good,
            f"kv_scales of layer {layer} must be None or two floats from "
            f"{SMALLEST_SCALE} to {LARGEST_SCALE}, got {pair!r}",
        )


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Attributes:
        rope_type: `linear` divides every frequency by `factor`; `llama3` divides
            the low ones, keeps the high ones and blends in between (Llama 3.1).
        factor: How many times longer the context becomes.
        low_freq_factor: `llama3` only: wavelengths longer than
            original / low_freq_factor are divided by `factor`.
        high_freq_factor: `llama3` only: wavelengths shorter than
            original / high_freq_factor are kept.
        original_max_position_embeddings: `llama3` only, in tokens.
    """

    rope_type: RopeType
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        _require(
            self.rope_type in ("linear", "llama3"),
            f"rope_type must be 'linear' or 'llama3', got {self.rope_type!r}",
        )
        _require_positive_real(self, "factor")
        if self.rope_type == "llama3":
            _require_positive_int(self, "original_max_position_embeddings")
            _require(
                0 < self.low_freq_factor < self.high_freq_factor,
                "llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor!r} and {self.high_freq_factor!r}",
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the arithmetic of a Llama-architecture decoder.

    Names are Hugging Face's. `head_dim` is never derived here: a converter reads it
    or derives it once.

    Attributes:
        model_type: Family name as Hugging Face writes it (`llama`, `qwen2`, `qwen3`);
            used by export, never by the arithmetic.
        attention_bias: q, k and v projections have a bias.
        attention_output_bias: The output projection has a bias too.
        qk_norm: RMSNorm over head_dim on q and k, before RoPE (Qwen3).
        eos_token_ids: Every id that ends generation; the union of what the source's
            config files say.
        dtype: Name of the parameters' dtype.
        kv_scales: Calibrated scales of a float8 KV cache, as the source carries them:
            one (k_scale, v_scale) a layer, a stored value being its code times the
            scale, and None for a layer without. Empty: no layer has any. An export
            holds them as float32.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    model_type: str = "llama"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    kv_scales: tuple[tuple[float, float] | None, ...] = ()

    def __post_init__(self) -> None:
        _require_positive_int(
            self,
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} must be a multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even")
        _require_positive_real(self, "rope_theta", "rms_norm_eps")
        for name in (
            "tie_word_embeddings",
            "attention_bias",
            "attention_output_bias",
            "mlp_bias",
            "qk_norm",
        ):
            value = getattr(self, name)
            _require(
                isinstance(value, bool), f"{name} must be true or false, got {value!r}"
            )
        bos = self.bos_token_id
        _require(
            bos is None or (isinstance(bos, int) and bos >= 0),
            f"bos_token_id must be a token id or null, got {bos!r}",
        )
        _require(
            self.dtype in DTYPES,
            f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}",
        )
        outside = [t for t in self.eos_token_ids if not 0 <= t < self.vocab_size]
        _require(
            not outside,
            f"eos_token_ids {outside} lie outside the vocabulary of {self.vocab_size}",
        )
        _check_kv_scales(self.kv_scales, self.num_hidden_layers)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelConfig":
        """Build a config from what `to_json` returned.

        Raises:
            ValueError: A key is unknown or missing, or a value is out of range.
        """
        values = dict(data)
        _require_keys(cls, values, "the model config")
        scaling = values.get("rope_scaling")
        if scaling is not None:
            _require(
                isinstance(scaling, dict),
                f"rope_scaling must be an object or null, got {scaling!r}",
            )
            _require_keys(RopeScaling, scaling, "rope_scaling")
            values["rope_scaling"] = RopeScaling(**scaling)
        values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
        kv_scales = values.get("kv_scales")
        if isinstance(kv_scales, list):
            values["kv_scales"] = tuple(
                tuple(pair) if isinstance(pair, list) else pair for pair in kv_scales
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The shape of a paged KV cache.

    Attributes:
        num_blocks: Blocks in the pool, the null block included: one is never
            allocated.
        block_size: Tokens a block holds; the GPU kernels want a multiple of 8
            (offsets of bulk copies into tiled shared memory are multiples of 8 rows).
        kv_cache_dtype: What K and V are stored as: one of `KV_FORMATS`, or two of them
            as "K:V"; `auto` is `dtype`.
        dtype: The model's dtype, for `auto` and for `skip_layers`.
        skip_layers: Layers that are stored in `dtype`, whatever `kv_cache_dtype` is.
        rotation: Rotate by a Hadamard matrix what is stored in 4 bits; for the others
            nothing changes.
        kv_scales: For each layer the scales of its keys and values, or None; the
            static formats need them (`ModelConfig.kv_scales`).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    kv_cache_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    skip_layers: tuple[int, ...] = ()
    rotation: bool = False
    kv_scales: tuple[tuple[float, float] | None, ...] = ()

    def __post_init__(self) -> None:
        _require_positive_int(
            self, "num_layers", "num_kv_heads", "head_dim", "num_blocks", "block_size"
        )
        _require(
            self.num_blocks >= 2,
            f"num_blocks must be at least 2 (block 0 is the null block), got "
            f"{self.num_blocks}",
        )
        _require(
            self.num_blocks * self.block_size < 2**31,
            f"num_blocks {self.num_blocks} * block_size {self.block_size} slots do not "
            "fit below 2**31: slots are int32",
        )
        _require(
            self.dtype in DTYPES, f"dtype must be one of {DTYPES}, got {self.dtype!r}"
        )
        _check_kv_format(self.kv_cache_dtype, self.skip_layers, self.rotation)
        outside = [i for i in self.skip_layers if not 0 <= i < self.num_layers]
        _require(
            not outside,
            f"skip_layers {outside} are outside the cache's {self.num_layers} layers",
        )
        _require(
            self.head_dim % 2 == 0 or not has_4_bits(self.kv_cache_dtype),
            f"head_dim {self.head_dim} must be even for vectors of 4 bits",
        )
        _check_kv_scales(self.kv_scales, self.num_layers)
        missing = [
            layer
            for layer, scales in enumerate(self.kv_scales or (None,) * self.num_layers)
            if scales is None and layer not in self.skip_layers
        ]
        _require(
            not missing or not has_static_scale(self.kv_cache_dtype),
            f"kv_cache_dtype {self.kv_cache_dtype!r} needs calibrated scales, and "
            f"layers {missing} have none: skip those layers, or take a format that "
            "computes its scales",
        )

    @functools.cached_property
    def formats(self) -> tuple[tuple[KVFormat, KVFormat], ...]:
        """For each layer the forms of its keys and of its values."""
        names = split_kv_cache_dtype(self.kv_cache_dtype)
        k_name, v_name = (self.dtype if name == "auto" else name for name in names)
        scales = self.kv_scales or (None,) * self.num_layers
        formats = []
        for layer in range(self.num_layers):
            if layer in self.skip_layers:
                k_format = v_format = KVFormat(self.dtype)
            else:
                k_scale, v_scale = scales[layer] or (None, None)
                k_format = make_kv_format(k_name, self.rotation, k_scale)
                v_format = make_kv_format(v_name, self.rotation, v_scale)
            formats.append((k_format, v_format))
        return tuple(formats)

    @property
    def block_root(self) -> bytes:
        """What digests of blocks start from: equal if equal bytes mean the same.

        Equal only for pools whose blocks could be exchanged; the weights are not in it.
        """
        formats = ",".join(
            f"{k_format}:{v_format}" for k_format, v_format in self.formats
        )
        shape = f"{self.num_kv_heads}x{self.block_size}x{self.head_dim}"
        return f"{shape};{formats}".encode()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's K and V take in all layers, scales included."""
        per_head = sum(
            kv_format.vector_bytes(self.head_dim)
            for both in self.formats
            for kv_format in both
        )
        return self.num_kv_heads * per_head

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers."""
        return self.bytes_per_token * self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache, the null block included."""
        return self.bytes_per_block * self.num_blocks


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs a model; the same keywords as `LLM`.

    Attributes:
        dtype: Dtype of parameters and arithmetic; `auto` keeps the checkpoint's.
        kv_cache_dtype: What K and V are stored as: one of `KV_FORMATS`
            (`jaxkv.kv_format`), or two of them as "K:V"; `auto` is `dtype`.
        kv_cache_skip_layers: Layers whose K and V are stored in `dtype` all the same.
        kv_cache_rotation: Rotate by a Hadamard matrix what is stored in 4 bits.
        block_size: Tokens a block; the GPU kernels want a multiple of 8.
        num_blocks: Blocks in the pool, the null block included. None: what
            `memory_fraction` of the device's memory holds beside the parameters; on
            CPU the smaller of max_num_seqs * max_model_len tokens and a quarter of
            the free memory.
        memory_fraction: Share of a GPU's memory that the engine may use.
        max_model_len: Longest request in tokens, prompt and output; None: the
            checkpoint's. It may exceed the pool.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most tokens computed in one step; at least
            max_num_seqs, so that every running request gets its token.
        max_num_partial_prefills: Most requests whose prompts are part way at once.
        long_prefill_token_threshold: Most tokens of one prompt in one step;
            0: the whole budget.
        policy: `fcfs` serves requests in order of arrival, `priority` in order of their
            priority first; a strictly more urgent one preempts others.
        preemption: How a preempted request gets its K and V back: `swap` copies them
            to host memory as far as it goes, `recompute` drops them, `auto` does what
            is estimated to take less time.
        swap_space: Host memory for preempted requests, in GiB; 0: none.
        swap_bandwidth: Bytes between device and host, in GB (10^9) a second; None:
            measured in the constructor if `auto` has a choice, which compiles one
            bucket also when `warmup` is lazy.
        prefill_rate: Prompt tokens computed in a second; None: likewise.
        enable_prefix_caching: Requests find the blocks of equal first tokens that
            others computed.
        async_scheduling: Schedule and dispatch each step before the last one's tokens
            are known to the host, which then works while the device does. `step`
            reports one step late, and a request that turns out to have ended costs at
            most one row of one step in vain.
        multi_step: Decoding steps that run as one when everybody decodes. The host has
            less to do; requests are admitted and reported less often, and what only
            the host sees to end, by a stop string or an abort, costs up to so many
            tokens computed in vain, and as many in a step under way.
        warmup: `eager` compiles every bucket in the constructor, `lazy` on first use.
        debug_blocks: Find faults in the handling of blocks, for several times the
            host's work: check before every step that each slot that attention is going
            to read holds the request's own token at that position, fill released blocks
            with NaN, and check the scheduler's invariants after every step. What is
            wrong raises an AssertionError that names request, position and block.
        attention_implementation: As `paged_attention`'s `implementation`.
        seed: Seed of requests that bring none.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_skip_layers: tuple[int, ...] = ()
    kv_cache_rotation: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    swap_space: float = 0
    swap_bandwidth: float | None = None
    prefill_rate: float | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    multi_step: int = 1
    warmup: Literal["eager", "lazy"] = "eager"
    debug_blocks: bool = False
    attention_implementation: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _require_positive_int(
            self,
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_partial_prefills",
            "multi_step",
        )
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                _require_positive_int(self, name)
        _check_kv_format(
            self.kv_cache_dtype,
            self.kv_cache_skip_layers,
            self.kv_cache_rotation,
            prefix="kv_cache_",
        )
        for name, allowed in (
            ("dtype", ("auto", *DTYPES)),
            ("policy", ("fcfs", "priority")),
            ("preemption", ("auto", "swap", "recompute")),
            ("enable_prefix_caching", (True, False)),
            ("warmup", ("eager", "lazy")),
            (
                "attention_implementation",
                ("auto", "xla", "mosaic_gpu", "cpu", "reference"),
            ),
        ):
            value = getattr(self, name)
            _require(
                value in allowed, f"{name} must be one of {allowed}, got {value!r}"
            )
        for name in ("async_scheduling", "debug_blocks"):
            value = getattr(self, name)
            _require(
                isinstance(value, bool),
                f"{name} must be True or False, got {value!r}",
            )
        _require(
            isinstance(self.memory_fraction, int | float)
            and 0 < self.memory_fraction <= 1,
            f"memory_fraction must be in (0, 1], got {self.memory_fraction!r}",
        )
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
            f"max_num_seqs {self.max_num_seqs}: every running request gets a token in "
            "every step",
        )
        _require(
            isinstance(self.long_prefill_token_threshold, int)
            and self.long_prefill_token_threshold >= 0,
            "long_prefill_token_threshold must be an integer >= 0, got "
            f"{self.long_prefill_token_threshold!r}",
        )
        for name in ("swap_bandwidth", "prefill_rate"):
            if getattr(self, name) is not None:
                _require_positive_real(self, name)
        _require(
            isinstance(self.swap_space, int | float)
            and not isinstance(self.swap_space, bool)
            and 0 <= self.swap_space <= 2**20,
            f"swap_space must be in [0, 2**20] GiB, got {self.swap_space!r}",
        )
        _require(
            self.preemption != "swap" or self.swap_space > 0,
            "preemption 'swap' needs a swap_space, got 0 GiB",
        )
        _require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**32,
            f"seed must be an integer in [0, 2**32), got {self.seed!r}",
        )
