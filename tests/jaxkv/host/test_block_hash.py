import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxkv.host.block_hash import block_hashes

TOKENS = list(range(10))


def test_only_full_blocks_are_hashed():
    sizes = [len(block_hashes(range(n), 4)) for n in (0, 1, 3, 4, 5, 8, 9)]
    assert sizes == [0, 0, 0, 1, 1, 2, 2]


def test_a_digest_is_sha256_over_parent_and_tokens():
    def tagged(tag, value):
        lengths = len(tag).to_bytes(8, "little") + len(value).to_bytes(8, "little")
        return lengths + tag + value

    def digest(parent, tokens):
        data = b"".join(token.to_bytes(8, "little") for token in tokens)
        message = tagged(b"parent", parent) + tagged(b"tokens", data)
        return hashlib.sha256(message).digest()

    first = digest(b"", TOKENS[:4])
    assert block_hashes(TOKENS, 4) == [first, digest(first, TOKENS[4:8])]


def test_equal_prefixes_have_equal_digests_and_a_change_reaches_all_later_ones():
    ours = block_hashes(TOKENS, 2)
    assert block_hashes(TOKENS[:6], 2) == ours[:3]
    other = block_hashes([*TOKENS[:2], 99, *TOKENS[3:]], 2)
    assert other[0] == ours[0]
    assert not set(other[1:]) & set(ours[1:])


def test_a_chain_can_be_continued_from_its_last_digest():
    ours = block_hashes(TOKENS, 2, salt="s")
    head = block_hashes(TOKENS[:4], 2, salt="s")
    assert head + block_hashes(TOKENS[4:], 2, parent=head[-1]) == ours


def test_arrays_and_lists_hash_alike():
    for dtype in (np.int32, np.int64, ">i8"):
        assert block_hashes(np.array(TOKENS, dtype), 4) == block_hashes(TOKENS, 4)


def test_everything_that_changes_k_and_v_changes_every_digest():
    variants = [
        {},
        {"parent": b"root"},
        {"adapter": "a"},
        {"adapter": b"a"},
        {"adapter": "b"},
        {"adapter": 1},
        {"adapter": "1"},
        {"adapter": ""},
        {"salt": "a"},
        {"salt": "ab"},
        {"adapter": "a", "salt": "b"},
        {"adapter": "b", "salt": "a"},
        {"extras": [("adapter", "a")]},
        {"extras": [("salt", "a")]},
        {"extras": [("x", "ab")]},
        {"extras": [("xa", "b")]},
        {"extras": [("x", "a"), ("x", "b")]},
        {"extras": [("x", "b"), ("x", "a")]},
    ]
    digests = [digest for kw in variants for digest in block_hashes(TOKENS, 4, **kw)]
    assert len(digests) == 2 * len(variants) == len(set(digests))


def test_block_size_is_not_confused():
    assert not set(block_hashes(TOKENS, 2)) & set(block_hashes(TOKENS, 4))


def test_digests_are_the_same_in_every_process():
    script = (
        "from jaxkv.host.block_hash import block_hashes\n"
        "print(block_hashes(range(4), 4, adapter='a', salt='s')[0].hex())"
    )
    ours = block_hashes(range(4), 4, adapter="a", salt="s")[0]
    assert len(ours) == 32
    for seed in ("0", "1"):
        command = [sys.executable, "-c", script]
        paths = os.pathsep.join(sys.path)
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        out = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        )
        assert out.stdout.strip() == ours.hex()


def test_a_block_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="block_size must be a positive integer"):
        block_hashes(TOKENS, 0)
