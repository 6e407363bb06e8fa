"""The kernel benchmark's cases: their shapes, names, bytes and random arrays."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BATCHES = tuple(2**n for n in range(10))  # 1 .. 512
LENGTHS = tuple(512 * 2**n for n in range(6))  # 512 .. 16384
KV_HEADS = (4, 8)

# What all sets of a case's inputs read together: 40 times the 50 MB of an H200's L2.
_ROTATED_BYTES = 2 * 2**30
_MAX_SETS = 256
_SLICE_BYTES = 64 * 2**20

FORMATS = ("int8", "fp8_e4m3", "int4")
GROUP = 32
"""Elements that share a scale in int4."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call: rows of (q_len, kv_len), heads and blocks.

    `dtype` is the queries', and that of keys and values if their `kv_format` is plain.
    """

    rows: tuple[tuple[int, int], ...]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_format: str = "plain"

    @property
    def tokens(self) -> int:
        """Queries of all rows."""
        return sum(q_len for q_len, _ in self.rows)

    @property
    def width(self) -> int:
        """Blocks of the longest row."""
        return max(self.blocks_of_rows)

    @property
    def blocks_of_rows(self) -> tuple[int, ...]:
        """Blocks of each row."""
        return tuple(-(-kv_len // self.block_size) for _, kv_len in self.rows)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5

    @property
    def is_decode(self) -> bool:
        """Whether each row has one query."""
        return all(q_len == 1 for q_len, _ in self.rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values, their scales included."""
        slots = 2 * self.kv_heads * self.block_size
        if self.kv_format == "plain":
            return slots * self.head_dim * jnp.dtype(self.dtype).itemsize
        if self.kv_format == "int4":
            return slots * (self.head_dim // 2 + self.head_dim // GROUP * 2)
        return slots * (self.head_dim + 4)

    @property
    def num_sets(self) -> int:
        """Sets of inputs to rotate between, so that L2 serves none a second time."""
        kv_bytes = sum(self.blocks_of_rows) * self.block_bytes
        return min(-(-_ROTATED_BYTES // kv_bytes), _MAX_SETS)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool that holds the keys and values of all sets."""
        return self.num_sets * sum(self.blocks_of_rows) * self.block_bytes


def moved_bytes(case: Case) -> int:
    """Return the bytes that a call has to move at least.

    Once each: every block that holds keys of a row, for K and for V; queries; outputs.
    """
    queries = case.tokens * case.q_heads * case.head_dim
    return (
        sum(case.blocks_of_rows) * case.block_bytes
        + 2 * queries * jnp.dtype(case.dtype).itemsize
    )


def operations(case: Case) -> int:
    """Return the multiplications and additions of both products, visible keys only."""
    # Query i of a row sees kv_len - q_len + i + 1 keys.
    pairs = sum(
        q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2
        for q_len, kv_len in case.rows
    )
    return 4 * pairs * case.q_heads * case.head_dim


def grid() -> dict[str, Case]:
    """Return every case by its name."""
    cases = {}
    for kv_heads in KV_HEADS:
        for batch in BATCHES:
            for length in LENGTHS:
                name = f"decode-{batch}x{length}-kv{kv_heads}"
                cases[name] = Case(((1, length),) * batch, kv_heads=kv_heads)
        for batch, length in ((1, 16384), (16, 2048), (64, 1024), (64, 8192)):
            for kv_format in FORMATS:
                name = f"decode-{batch}x{length}-kv{kv_heads}-{kv_format}"
                rows = ((1, length),) * batch
                cases[name] = Case(rows, kv_heads=kv_heads, kv_format=kv_format)
        few = ((4, 4100),)
        ragged = {
            "prefill-1x2048": ((2048, 2048),),
            "prefill-8x256": ((256, 256),) * 8,
            "prefill-1x2048-after8192": ((2048, 10240),),
            "prefill-8x256-after4096": ((256, 4352),) * 8,
            "mixed-63x4096-and-1x512-after2048": ((1, 4096),) * 63 + ((512, 2560),),
            "few-8x4-after4096": few * 8,
            "few-64x4-after4096": few * 64,
        }
        for name, rows in ragged.items():
            cases[f"{name}-kv{kv_heads}"] = Case(rows, kv_heads=kv_heads)
    return cases


QUICK = (
    "decode-1x1024-kv8",
    "decode-1x16384-kv8",
    "decode-16x2048-kv8",
    "decode-64x1024-kv8",
    "decode-64x8192-kv8",
    "decode-256x2048-kv8",
    "decode-64x1024-kv4",
    "decode-64x8192-kv4",
    "prefill-1x2048-kv8",
    "prefill-8x256-after4096-kv8",
    "mixed-63x4096-and-1x512-after2048-kv8",
    "few-64x4-after4096-kv8",
    *(f"decode-64x8192-kv8-{kv_format}" for kv_format in FORMATS),
)
"""The cases of a quick run."""

_tiny = functools.partial(Case, q_heads=4, kv_heads=2, head_dim=64)
INTERPRETED = {
    "decode-interpreted": _tiny(((1, 65), (1, 20))),
    "prefill-interpreted": _tiny(((9, 70),)),
    **{
        f"decode-interpreted-{kv_format}": _tiny(((1, 65),), kv_format=kv_format)
        for kv_format in FORMATS
    },
}
"""Cases for the interpreter, which takes a second a program."""


class Inputs(NamedTuple):
    """Arrays of a case: one pool, and several sets of queries and block tables.

    The sets' blocks are disjoint. Those of set s are, in random order,
    1 + s * blocks to (s + 1) * blocks.

    Attributes:
        k_blocks: [num_blocks, kv_heads, block_size, head_dim]; of int4 half as wide.
        v_blocks: Likewise.
        scales: k_scales and v_scales by name, if the blocks are quantised.
        q: A set's [tokens, q_heads, head_dim], for each.
        block_tables: A set's [rows, width], for each.
        kv_lens: [rows], the same in all sets.
        cu_q_lens: [rows + 1], the same in all sets.
    """

    k_blocks: jax.Array
    v_blocks: jax.Array
    scales: dict[str, jax.Array]
    q: list[jax.Array]
    block_tables: list[jax.Array]
    kv_lens: jax.Array
    cu_q_lens: jax.Array

    def arguments(self, index: int) -> tuple[jax.Array, ...]:
        """Return the arguments of one call, with the queries and tables of a set."""
        return (
            self.q[index],
            self.k_blocks,
            self.v_blocks,
            self.block_tables[index],
            self.kv_lens,
            self.cu_q_lens,
        )


def make_inputs(case: Case, seed: int, num_sets: int) -> Inputs:
    """Draw a case's arrays: normal values everywhere, blocks in random order."""
    rng = np.random.default_rng(seed)
    num_taken = sum(case.blocks_of_rows)
    tables = np.zeros((num_sets, len(case.rows), case.width), np.int32)
    for index, table in enumerate(tables):
        ids = 1 + index * num_taken + rng.permutation(num_taken)
        ends = np.cumsum(case.blocks_of_rows)
        for row, mine in enumerate(np.split(ids, ends[:-1])):
            table[row, : len(mine)] = mine
    k_key, v_key, q_key = jax.random.split(jax.random.key(seed), 3)
    num_blocks = 1 + num_sets * num_taken
    q_shape = (num_sets, case.tokens, case.q_heads, case.head_dim)
    k_blocks, k_scales = _random_blocks(k_key, case, num_blocks)
    v_blocks, v_scales = _random_blocks(v_key, case, num_blocks)
    is_plain = case.kv_format == "plain"
    return Inputs(
        k_blocks=k_blocks,
        v_blocks=v_blocks,
        scales={} if is_plain else {"k_scales": k_scales, "v_scales": v_scales},
        q=list(jax.random.normal(q_key, q_shape, jnp.float32).astype(case.dtype)),
        block_tables=list(jnp.asarray(tables)),
        kv_lens=jnp.array([kv_len for _, kv_len in case.rows], jnp.int32),
        cu_q_lens=jnp.array(
            np.cumsum([0, *(q_len for q_len, _ in case.rows)]), jnp.int32
        ),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_blocks(
    key: jax.Array, case: Case, num_blocks: int
) -> tuple[jax.Array, jax.Array | None]:
    # Drawn a slice at a time: the random bits of a whole pool would not fit beside it.
    blocks = max(1, min(num_blocks, _SLICE_BYTES // case.block_bytes))
    num_slices = math.ceil(num_blocks / blocks)
    shape = (blocks, case.kv_heads, case.block_size, case.head_dim)

    def one_slice(key):
        vectors = jax.random.normal(key, shape, jnp.float32)
        return _QUANTISE[case.kv_format](vectors, case)

    slices = jax.lax.map(one_slice, jax.random.split(key, num_slices))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), slices)


def _plain(vectors: jax.Array, case: Case) -> tuple[jax.Array, None]:
    return vectors.astype(case.dtype), None


def _int8(vectors: jax.Array, case: Case) -> tuple[jax.Array, jax.Array]:
    scales = jnp.abs(vectors).max(axis=-1) / 127
    return jnp.rint(vectors / scales[..., None]).astype(jnp.int8), scales


def _fp8_e4m3(vectors: jax.Array, case: Case) -> tuple[jax.Array, jax.Array]:
    scales = jnp.abs(vectors).max(axis=-1) / 448
    return (vectors / scales[..., None]).astype(jnp.float8_e4m3fn), scales


def _int4(vectors: jax.Array, case: Case) -> tuple[jax.Array, jax.Array]:
    groups = vectors.reshape(*vectors.shape[:-1], -1, GROUP)
    scales = (jnp.abs(groups).max(axis=-1) / 7).astype(jnp.bfloat16)
    codes = jnp.rint(groups / scales[..., None].astype(jnp.float32)).astype(jnp.int8)
    pairs = jnp.clip(codes, -8, 7).reshape(*vectors.shape[:-1], -1, 2)
    halves = jax.lax.bitcast_convert_type(pairs, jnp.uint8) & jnp.uint8(15)
    return halves[..., 0] | halves[..., 1] << 4, scales


_QUANTISE = {"plain": _plain, "int8": _int8, "fp8_e4m3": _fp8_e4m3, "int4": _int4}
