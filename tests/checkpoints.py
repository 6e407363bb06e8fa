"""A tiny converted checkpoint with a byte-level tokenizer and a chat template."""

import json

import safetensors.numpy
import tokenizers

from convert import convert_checkpoint
from tests.convert.folders import TINY, tiny_tensors

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def byte_tokenizer():
    """One token a byte, then <s> and </s>: ids 0..255, 256, 257."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_tiny_checkpoint(folder, **changes):
    """Convert a random Llama of 258 byte tokens into `folder`; return `folder`."""
    source = folder.parent / f"{folder.name}-source"
    source.mkdir(parents=True)
    config = TINY | {
        "vocab_size": 264,  # six rows of padding
        "max_position_embeddings": 2048,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    config |= changes
    (source / "config.json").write_text(json.dumps(config))
    tensors = {name: 0.3 * x for name, x in tiny_tensors(config).items()}
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    byte_tokenizer().save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"})
    )
    convert_checkpoint(source, folder, progress=False)
    return folder
