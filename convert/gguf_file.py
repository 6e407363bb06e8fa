"""A GGUF file as a `Source`: metadata to `ModelConfig`, `blk.N.*` to our parameters.

Three things are not a matter of names. Quantised tensors are dequantised to float32
as they are loaded. For `llama` alone, llama.cpp's converter reorders the rows of the
q and k projections, because its RoPE rotates neighbours (2j, 2j + 1) where Hugging
Face rotates halves (j, j + head_dim / 2); that is undone here, and not for qwen2 and
qwen3, whose rows it leaves alone. And Llama 3.1's rope scaling is no metadata: it is
a tensor, `rope_freqs.weight`, with one divisor for each frequency; it is recognised
by its numbers.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float, Shaped

from convert.gguf_header import Header, TensorInfo, read_header
from convert.gguf_metadata import Metadata
from convert.gguf_tokenizer import (
    end_of_generation_ids,
    tokenizer_config,
    tokenizer_json,
)
from convert.source import Source, TensorRef, check_tensors
from jaxkv.config import ModelConfig, RopeScaling
from jaxkv.device.llama import param_shapes

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"
ROWS_AT_ONCE = 1024

_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)

_TOP_LEVEL = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


def open_gguf(path: str | Path) -> Source:
    """Open a GGUF file of a Llama-architecture model.

    Reads the header and, where it is there, `rope_freqs.weight`; no other tensor.

    Args:
        path: One .gguf file, unsplit; architecture `llama`, `qwen2` or `qwen3`.

    Returns:
        The model, its tensors in Hugging Face's names and row order, its tokenizer.

    Raises:
        ValueError: The file is truncated, of another architecture, or has a tensor
            or a metadata key that this converter cannot honour; the name is given.
    """
    header = read_header(Path(path))
    metadata = Metadata(header)
    architecture = metadata.architecture(ARCHITECTURES)
    config = _read_config(header, metadata, architecture)
    refs = {}
    for info in header.tensors.values():
        if info.name != ROPE_FREQS:
            ref = _tensor_ref(header.path, info, _row_heads(info, config))
            refs[_parameter_name(info.name)] = ref
    check_tensors(str(path), refs, param_shapes(config))
    generation_config: dict[str, Any] = {"eos_token_id": list(config.eos_token_ids)}
    if config.bos_token_id is not None:
        generation_config["bos_token_id"] = config.bos_token_id
    return Source(
        where=str(path),
        config=config,
        tensors=refs,
        tokenizer_json=tokenizer_json(header),
        tokenizer_config=tokenizer_config(header),
        generation_config=generation_config,
    )


def undo_rope_permutation(
    rows: Shaped[np.ndarray, "out *in"], num_heads: int
) -> Shaped[np.ndarray, "out *in"]:
    """Bring rows of a q or k projection from neighbour order to half-split order.

    Args:
        rows: Row 2j + h of a head is what Hugging Face has in row h * head_dim / 2 + j
            (h is 0 or 1).
        num_heads: Heads the rows belong to: the key heads for a k projection.
    """
    per_head = (num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return rows.reshape(per_head).swapaxes(1, 2).reshape(rows.shape)


def llama3_scaling(
    factors: Float[np.ndarray, " half_head_dim"], rope_theta: float
) -> RopeScaling | None:
    """Recognise Llama 3.1's rope scaling by its divisors of the frequencies.

    The largest divisor is taken for `factor`; low_freq_factor 1, high_freq_factor 4
    and an original context of 8192 are what every Llama 3.1, 3.2 and 3.3 has. The
    divisors these give must be the ones in the file.

    Args:
        factors: One for each frequency, the highest frequency first.
        rope_theta: Base of the frequencies.

    Returns:
        The scaling; None if every divisor is 1.

    Raises:
        ValueError: The divisors are not those of such a scaling.
    """
    if np.all(factors == 1):
        return None
    if not np.all(np.isfinite(factors)):
        raise ValueError(f"{ROPE_FREQS} has divisors that are not finite")
    scaling = RopeScaling(rope_type="llama3", factor=round(float(factors.max()), 4))
    wavelengths = 2 * np.pi * rope_theta ** (np.arange(len(factors)) / len(factors))
    turns = scaling.original_max_position_embeddings / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / (kept + (1 - kept) / scaling.factor)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0):
        worst = int(np.argmax(np.abs(factors / expected - 1)))
        raise ValueError(
            f"{ROPE_FREQS} is not Llama 3.1's rope scaling: divisor {worst} is "
            f"{factors[worst]:.6g}; factor {scaling.factor:g}, low 1, high 4 and an "
            f"original context of 8192 would give {expected[worst]:.6g}"
        )
    return scaling


def _read_config(header: Header, metadata: Metadata, architecture: str) -> ModelConfig:
    """Turn `<architecture>.*` into a config; every key there is used or known."""
    tensors = header.tensors
    embedding = tensors.get("token_embd.weight")
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", hidden_size // num_heads)
    metadata.expect("attention.value_length", head_dim)
    metadata.expect("rope.dimension_count", head_dim)
    rope_theta = metadata.number("rope.freq_base", 10000.0)
    num_layers = metadata.integer("block_count")
    if num_layers > len(tensors):  # before anything is listed layer by layer
        raise ValueError(
            f"{header.path}: {architecture}.block_count is {num_layers}, but the file "
            f"has only {len(tensors)} tensors"
        )
    rms_norm_eps = metadata.number("attention.layer_norm_rms_epsilon")
    if rms_norm_eps < 0:
        raise ValueError(
            f"{header.path}: {architecture}.attention.layer_norm_rms_epsilon must be "
            f">= 0, got {rms_norm_eps!r}"
        )
    values: dict[str, Any] = dict(
        model_type=architecture,
        vocab_size=metadata.integer("vocab_size", embedding.shape[0])
        if embedding
        else metadata.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=metadata.integer("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=metadata.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=metadata.integer("context_length"),
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(header, metadata, head_dim, rope_theta),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture == "qwen3",
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_of_generation_ids(header),
        dtype=_common_dtype(header),
    )
    with _naming(header.path):
        config = ModelConfig(**values)
    metadata.check_all_used()
    return config


def _rope_scaling(
    header: Header, metadata: Metadata, head_dim: int, rope_theta: float
) -> RopeScaling | None:
    linear = metadata.linear_rope_factor()
    info = header.tensors.get(ROPE_FREQS)
    if info is None:
        with _naming(header.path):
            return (
                RopeScaling(rope_type="linear", factor=linear) if linear != 1 else None
            )
    if info.shape != (head_dim // 2,) or linear != 1:
        raise ValueError(
            f"{header.path}: {ROPE_FREQS} has shape {list(info.shape)} for a head_dim "
            f"of {head_dim}, beside a linear rope factor of {linear:g}; expected "
            f"[{head_dim // 2}] and a factor of 1"
        )
    factors = _tensor_ref(header.path, info, None).load().astype(np.float32)
    with _naming(header.path):
        return llama3_scaling(factors, rope_theta)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _common_dtype(header: Header) -> str:
    """Name the dtype that holds every matrix exactly.

    Norms and biases do not count: converters keep them in float32 beside matrices of
    16 bits, where they hold values that were 16 bits wide before.
    """
    quants = {info.quant for info in header.tensors.values() if len(info.shape) > 1}
    if len(quants) == 1 and (only := quants.pop()) in _PLAIN:
        return _PLAIN[only].name
    return "float32"


def _parameter_name(name: str) -> str:
    """Return our name for a tensor, or its own where it has no place in the model."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match and match[2] in _IN_BLOCK:
        return f"layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
    return name


def _row_heads(info: TensorInfo, config: ModelConfig) -> int | None:
    """Return into how many heads a tensor's rows were reordered; None: not at all."""
    match = _BLOCK_NAME.fullmatch(info.name)
    if config.model_type != "llama" or not match:
        return None
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }.get(match[2])
    # A misshapen tensor is reported by check_tensors, with every other problem.
    fits = heads and info.shape[0] == heads * config.head_dim
    return heads if fits else None


def _tensor_ref(path: Path, info: TensorInfo, row_heads: int | None) -> TensorRef:
    if info.quant not in _PLAIN and info.quant not in _QUANTISED:
        known = ", ".join(quant.name for quant in (*_PLAIN, *_QUANTISED))
        raise ValueError(
            f"{path}: tensor {info.name} has type {info.quant.name}; known types are "
            f"{known}"
        )

    def load() -> np.ndarray:
        return _load(path, info, row_heads)

    dtype = _PLAIN.get(info.quant, np.dtype(np.float32))
    return TensorRef(name=info.name, shape=info.shape, dtype=dtype, load=load)


def _load(path: Path, info: TensorInfo, row_heads: int | None) -> np.ndarray:
    """Read one tensor into memory of its own; rows move before they grow."""
    raw = np.fromfile(path, np.uint8, count=info.num_bytes, offset=info.offset)
    if raw.size != info.num_bytes:
        raise ValueError(
            f"{path} changed while it was read: tensor {info.name} has {raw.size} of "
            f"{info.num_bytes} bytes"
        )
    plain = _PLAIN.get(info.quant)
    if plain is not None:
        rows = raw.view(plain).reshape(info.shape)
    else:
        rows = raw.reshape(*info.shape[:-1], -1)
    if row_heads is not None:
        rows = undo_rope_permutation(rows, row_heads)
    return rows if plain is not None else _dequantise(rows, info)


def _dequantise(
    raw: Shaped[np.ndarray, "*out bytes"], info: TensorInfo
) -> Float[np.ndarray, "*out in"]:
    """Dequantise few rows at a time: the package holds every result twice."""
    rows = raw.reshape(-1, raw.shape[-1])
    numbers = np.empty((len(rows), info.shape[-1]), np.float32)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        numbers[part] = dequantize(rows[part], info.quant)
    return numbers.reshape(info.shape)
