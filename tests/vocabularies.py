"""Real tokenizers for tests, out of `fixtures/ggml_vocab` (see its script)."""

import functools
import lzma
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from convert.gguf_header import Header, read_header
from convert.gguf_tokenizer import tokenizer_json

FOLDER = Path(__file__).parent / "fixtures" / "ggml_vocab"


@functools.cache
def vocabulary(name: str) -> Header:
    """Header of `ggml-vocab-<name>.gguf`, as read by our reader."""
    packed = (FOLDER / f"ggml-vocab-{name}.gguf.xz").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"ggml-vocab-{name}.gguf"
        path.write_bytes(lzma.decompress(packed))
        return read_header(path)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """What we make of it; read back from JSON, as users do."""
    json_text = tokenizer_json(vocabulary(name))
    assert json_text is not None
    return Tokenizer.from_str(json_text)


def expected_pairs(name: str) -> list[tuple[str, list[int]]]:
    """The texts and the ids that the original tokenizer has for them."""
    path = FOLDER / f"ggml-vocab-{name}.gguf"
    inputs = Path(f"{path}.inp").read_bytes().decode("utf-8")
    texts = inputs.split("\n__ggml_vocab_test__\n")[:-1]
    lines = Path(f"{path}.out").read_text().split("\n")[:-1]
    ids = [[int(number) for number in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))
