"""Make GGUF files of a Hugging Face folder of a Llama: `... MODEL FOLDER`.

FOLDER gets float32.gguf and bfloat16.gguf. llama.cpp rotates neighbouring pairs of a
head's dimensions where Hugging Face rotates the two halves, so rows of the query and
key projections change places. The tokenizer is there because a server wants one: token
ids go in and come out, so how it would split a text does not matter.
"""

# pyright: reportMissingImports=false
# gguf is in the environment of this peer only.

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
FORMATS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}


def main() -> None:
    """Write a file for each format."""
    model, folder = map(Path, sys.argv[1:])
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise SystemExit("only a Llama whose rotary frequencies are not scaled")
    folder.mkdir()
    for dtype, kind in FORMATS.items():
        writer = gguf.GGUFWriter(folder / f"{dtype}.gguf", "llama")
        add_config(writer, config)
        add_tokenizer(writer, model, config["vocab_size"])
        for name, array in read_tensors(model):
            added = to_llama_cpp(name, array, config)
            # vectors, which norms multiply with, stay as they are
            raw = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
            new_name, _, last = name.rpartition(".")
            writer.add_tensor(
                f"{tensor_name(new_name)}.{last}",
                gguf.quants.quantize(added, raw),
                raw_dtype=raw,
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the model's dimensions."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, vocab_size: int) -> None:
    """Write the tokens and merges of tokenizer.json."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = [f"[unused{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, token_id in tokenizer["model"]["vocab"].items():
        tokens[token_id], types[token_id] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)


def read_tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a folder's safetensors files, in float32."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, _to_float32(path, 8 + length, tensor)


def _to_float32(path: Path, start: int, tensor: dict[str, Any]) -> np.ndarray:
    first, end = tensor["data_offsets"]
    stored = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor["dtype"]]
    count = (end - first) // np.dtype(stored).itemsize
    array = np.fromfile(path, stored, count, offset=start + first)
    if tensor["dtype"] == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32).reshape(tensor["shape"])


def to_llama_cpp(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Let the dimensions that are rotated together be neighbours."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }
    for projection, num_heads in heads.items():
        if projection in name:
            halves = array.reshape(num_heads, 2, config["head_dim"] // 2, -1)
            return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def tensor_name(name: str) -> str:
    """Return GGUF's name for a module of Hugging Face's."""
    if name in TENSORS:
        return TENSORS[name]
    _, _, layer, module = name.split(".", 3)
    return f"blk.{layer}.{LAYER_TENSORS[module]}"


if __name__ == "__main__":
    main()
