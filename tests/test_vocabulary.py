"""One word for one idea: identifiers keep to the words of docs/architecture.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxkv", "pallas_kernels", "cpu_kernels", "convert")

# What not to say, and what to say instead. Terms are whole words of an identifier:
# `page_table` is in `new_page_table` and in `PageTable`, not in `homepage_table`.
INSTEAD = {
    "page": "block",
    "pages": "blocks",
    "chunk": "block, or name what it is a part of",
    "chunks": "block, or name what they are parts of",
    "cell": "block or slot",
    "cells": "blocks or slots",
    "dummy": "NULL_BLOCK, or padding",
    "lane": "row",
    "lanes": "rows",
    "sequence": "request or row",
    "sequences": "requests or rows",
    "past_len": "num_computed_tokens",
    "past_lens": "num_computed_tokens",
    "cu_seqlens": "cu_q_lens",
    "extend_len": "q_len",
    "extend_lens": "q_lens",
    "context_len": "kv_len",
    "context_lens": "kv_lens",
    "seq_len": "kv_len",
    "seq_lens": "kv_lens",
    "seqlen": "kv_len",
    "seqlens": "kv_lens",
    "block_q": "tile_q",
    "block_kv": "tile_kv",
    "block_m": "tile_q",
    "block_n": "tile_kv",
    "touch": "share",
    "metadata": "Batch, or what it holds",
    "info": "what it holds",
}
# `free` is a state of a block, not something one does to it.
VERBS_INSTEAD = {"free": "release", "touch": "share", "deallocate": "release"}

# Identifiers that say a word for a reason: other people's names and other ideas.
ALLOWED = {
    "Sequence": "collections.abc",
    "_chunk": "scheduler: the part of a prompt that one step computes",
    "_info": "the command `jaxkv info`",
    "_add_info": "the command `jaxkv info`",
}
# Files about formats that have words of their own.
ALLOWED_IN = {
    "convert/gguf_file.py": {"metadata", "info"},
    "convert/gguf_header.py": {"metadata", "info"},
    "convert/gguf_metadata.py": {"metadata"},
    "convert/gguf_tokenizer.py": {"metadata"},
    "convert/export.py": {"metadata"},  # safetensors' __metadata__
    "convert/safetensors_reader.py": {"metadata"},
    "jaxkv/engine/checkpoint.py": {"metadata"},  # Orbax's
}


def words(identifier: str) -> list[str]:
    """`num_q` -> num, q; `KVCache` -> kv, cache."""
    pattern = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+"
    return [word.lower() for word in re.findall(pattern, identifier)]


def forbidden(identifier: str) -> list[str]:
    spelled = f"_{'_'.join(words(identifier))}_"
    return [term for term in INSTEAD if f"_{term}_" in spelled]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that the code gives or uses, with its line; strings do not count."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value, line
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from ((alias.name, line) for alias in node.names)
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield from ((name, line) for name in node.names)


def verbs(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of functions and of methods that are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any(
                isinstance(decorator, ast.Name) and decorator.id == "property"
                for decorator in node.decorator_list
            )
            if not is_property:
                yield node.name, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, node.lineno


def complaints(source: str, path: str = "") -> list[str]:
    tree = ast.parse(source)
    found = set()
    for name, line in identifiers(tree):
        terms = [t for t in forbidden(name) if t not in ALLOWED_IN.get(path, ())]
        if terms and name not in ALLOWED:
            found.add(f"{path}:{line} {name}: say {INSTEAD[terms[0]]}")
    for name, line in verbs(tree):
        # `free_blocks()` does something to blocks; `free_host_bytes()` counts bytes.
        parts = words(name)
        first = parts[0] if parts else ""
        if first in VERBS_INSTEAD and parts[1:2] in ([], ["block"], ["blocks"]):
            found.add(f"{path}:{line} {name}: say {VERBS_INSTEAD[first]}")
    return sorted(found)


def paths() -> list[str]:
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in files)


@pytest.mark.parametrize("path", paths())
def test_identifiers_keep_to_the_words(path):
    assert complaints((ROOT / path).read_text(), path) == []
    assert forbidden(Path(path).stem) == [] or path in ALLOWED_IN


@pytest.mark.parametrize("exception", [*ALLOWED, *ALLOWED_IN])
def test_every_exception_is_still_needed(exception):
    used = {
        name
        for path in paths()
        if exception in ALLOWED or path == exception
        for name, _ in identifiers(ast.parse((ROOT / path).read_text()))
    }
    if exception in ALLOWED:
        assert exception in used
    else:
        said = {term for name in used for term in forbidden(name)}
        assert ALLOWED_IN[exception] <= said


@pytest.mark.parametrize(
    "source",
    [
        "page_table = 1",
        "class PageTable: pass",
        "def f(context_lens): pass",
        "f(seq_len=3)",
        "x.cu_seqlens_q",
        "from flash import block_kv",
        "import numpy as chunk",
        "def touch(ids): pass",
        "pool.free(ids)",
        "def free_blocks(ids): pass",
        "BLOCK_M = 128",
        "NUM_PAGES = 3",
        "def f(*dummy): pass",
        "batch_metadata = 1",
    ],
)
def test_another_word_is_seen(source):
    assert len(complaints(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "num_free = 3",
        "max_num_seqs = 3",
        "value = header['llama.context_length']",
        "homepage = 'page'",
        "information = 1",
        "pool.num_free",
        "block_size = block_id = block_tables = 1",
        "def _free_host_bytes(): pass",
        "table.extend(ids)",
        "from collections.abc import Sequence",
        "subsequence = 1",
    ],
)
def test_the_right_words_are_fine(source):
    assert complaints(source) == []
