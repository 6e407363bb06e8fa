"""Tiny GGUF files, written by the `gguf` package."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Quant
from gguf.quants import quantize

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 12, 2, 4, 2, 64
TOKENS = [f"t{i}" for i in range(VOCAB)]


def block_shapes(layer: int, biases: tuple[str, ...] = (), qk_norm: bool = False):
    """Shapes of one block, by GGUF name."""
    q_dim, kv_dim = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q_dim, HIDDEN),
        "attn_k.weight": (kv_dim, HIDDEN),
        "attn_v.weight": (kv_dim, HIDDEN),
        "attn_output.weight": (HIDDEN, q_dim),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biases}
    if qk_norm:
        shapes |= {f"attn_{which}_norm.weight": (HEAD_DIM,) for which in "qk"}
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def tiny_tensors(*, tied: bool = True, **block: Any) -> dict[str, np.ndarray]:
    """Random float32 tensors of a whole model, by GGUF name."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= block_shapes(layer, **block)
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def random_blocks(shape: tuple[int, ...], quant: Quant, seed: int = 0) -> np.ndarray:
    """Valid quantised bytes: any bits, and float16 scales that are small numbers.

    The package quantises to no K format; every bit pattern of one is a valid block,
    as long as its scales are finite.
    """
    block_size, block_bytes = GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(seed)
    num_blocks = shape[-1] // block_size
    raw = rng.integers(0, 256, (*shape[:-1], num_blocks, block_bytes), np.uint8)
    scales_at = {Quant.Q4_K: (0, 2), Quant.Q6_K: (block_bytes - 2,)}[quant]
    for start in scales_at:
        scales = rng.uniform(0.001, 0.1, (*shape[:-1], num_blocks)).astype("<f2")
        raw[..., start : start + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], num_blocks * block_bytes)


def as_stored(tensor: np.ndarray, quant: Quant) -> np.ndarray:
    """A float32 tensor in a file's format; other numbers where it is a K format."""
    if quant in (Quant.Q4_K, Quant.Q6_K):
        return random_blocks(tensor.shape, quant, seed=len(tensor))
    return quantize(tensor, quant)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    architecture: str = "llama",
    quant: Quant = Quant.F32,
    quants: dict[str, Quant] | None = None,
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write a model.

    Args:
        tensors: Float32; a default model if None.
        quant: Type of matrices; vectors stay F32, as llama.cpp writes them.
        quants: Type by tensor name, over `quant`.
        metadata: Over the defaults: by key without architecture, or whole if it has
            `general.` or `split.` in front; None leaves a key out.
        tokenizer: By key without `tokenizer.`; none but the tokens by default.

    Returns:
        The tensors as stored: raw bytes where quantised.
    """
    tensors = tiny_tensors() if tensors is None else tensors
    values = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 50000.0,
        "rope.dimension_count": HEAD_DIM,
        **(metadata or {}),
    }
    writer = GGUFWriter(path, architecture)
    for key, value in values.items():
        whole = key.startswith(("general.", "split."))
        _add(writer, key if whole else f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    stored = {}
    for name, tensor in tensors.items():
        kind = (quants or {}).get(name, quant if tensor.ndim > 1 else Quant.F32)
        stored[name] = as_stored(tensor, kind)
        writer.add_tensor(name, stored[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
