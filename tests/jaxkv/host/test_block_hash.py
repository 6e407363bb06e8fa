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


def little_endian(tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def tagged(tag, value):
    lengths = len(tag).to_bytes(8, "little") + len(value).to_bytes(8, "little")
    return lengths + tag + value


def test_a_digest_is_sha256_over_parent_and_tokens():
    parent = bytes(range(32))
    first = hashlib.sha256(parent + little_endian(TOKENS[:4])).digest()
    second = hashlib.sha256(first + little_endian(TOKENS[4:8])).digest()
    assert block_hashes(TOKENS, 4, parent=parent) == [first, second]


@pytest.mark.parametrize("root", [b"", b"r", b"ro", b"roo", b"root", bytes(31)])
@pytest.mark.parametrize("salt", [None, b"s"])
def test_the_first_block_of_a_root_is_sha256_over_tagged_parts(root, salt):
    message = tagged(b"parent", root) + tagged(b"tokens", little_endian(TOKENS[:4]))
    if salt:
        values = tagged(b"str", b"salt") + tagged(b"bytes", salt)
        message += tagged(b"named", values)
    message += b"\0"
    while len(message) % 4 != 1:  # a block of a parent has a multiple of 4 bytes
        message += b"\0"
    first = hashlib.sha256(message).digest()
    second = hashlib.sha256(first + little_endian(TOKENS[4:8])).digest()
    assert block_hashes(TOKENS, 4, parent=root, salt=salt) == [first, second]


def test_extras_are_hashed_beside_a_parent_of_32_bytes():
    parent = bytes(range(32))
    message = tagged(b"parent", parent) + tagged(b"tokens", little_endian(TOKENS[:4]))
    values = tagged(b"str", b"adapter") + tagged(b"int", b"\7")
    message += tagged(b"named", values) + b"\0"
    message += bytes((1 - len(message)) % 4)
    digests = block_hashes(TOKENS[:4], 4, parent=parent, adapter=7)
    assert digests == [hashlib.sha256(message).digest()]


def test_digests_are_the_same_in_every_version():
    digests = [digest.hex() for digest in block_hashes(TOKENS, 4, parent=b"root")]
    assert digests == [
        "8a6cb513ae4bd799fe9fa3b74c2c3a49dd0e2b3aa7f9468fc52b0b9ee7a6db88",
        "0e98c8c38fd2d7de53850a89421ce6eb8a9bc45a3fd317087ff19d7e0819f5a7",
    ]


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
    ours = block_hashes(TOKENS, 4)
    for dtype in ("i1", "u1", ">i2", "u2", "i4", "u4", "i8", ">i8", "u8"):
        assert block_hashes(np.array(TOKENS, dtype), 4) == ours
    assert block_hashes(np.repeat(TOKENS, 2)[::2], 4) == ours
    for kind in (tuple, bytes, bytearray):
        assert block_hashes(kind(TOKENS), 4) == ours
    assert block_hashes([np.int64(token) for token in TOKENS], 4) == ours


def test_the_largest_token_id_is_hashed_in_full():
    tokens = [2**32 - 1, 0]
    parent = bytes(32)
    ours = [hashlib.sha256(parent + b"\xff\xff\xff\xff" + bytes(4)).digest()]
    assert block_hashes(tokens, 2, parent=parent) == ours
    for dtype in ("u4", "i8", "u8"):
        assert block_hashes(np.array(tokens, dtype), 2, parent=parent) == ours


@pytest.mark.parametrize("token", [-1, -(2**31), 2**32, 2**63, 2**64])
def test_token_ids_of_more_than_32_bits_are_refused(token):
    message = rf"token ids must be at least 0 and less than 2\*\*32, got {token}$"
    with pytest.raises(ValueError, match=message):
        block_hashes([3, token, 4, 5], 4)
    if token != 2**64:
        dtype = np.uint64 if token > 0 else np.int64
        with pytest.raises(ValueError, match=message):
            block_hashes(np.array([3, token, 4, 5], dtype), 4)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        ([1, 2.0], "2.0"),
        ([1, None], "None"),
        ([1, np.float32(2)], r"np\.float32\(2\.0\)"),
        (["1", "2"], "'1'"),
        ("12", "'1'"),
        (np.array([1.0, 2.0]), "an array of float64"),
        (np.array([True, False]), "an array of bool"),
        (np.array([1, 2], object), "an array of object"),
    ],
)
def test_token_ids_that_are_no_integers_are_refused(tokens, got):
    with pytest.raises(ValueError, match=f"token ids must be integers, got {got}$"):
        block_hashes(tokens, 2)


def test_everything_that_changes_k_and_v_changes_every_digest():
    variants = [
        {},
        {"parent": b"root"},
        {"parent": b"root" + bytes(4)},
        {"parent": bytes(31)},
        {"parent": bytes(32)},
        {"parent": bytes(33)},
        {"parent": bytes(32), "adapter": "a"},
        {"parent": bytes(32), "salt": "a"},
        {"parent": bytes(32), "extras": [("salt", "a")]},
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


def test_b18_digests_are_the_same_in_every_process():
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
