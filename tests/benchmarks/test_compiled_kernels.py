"""What a compiled module launches and moves, on programs written by hand."""

import pytest

from benchmarks import gpu_step, llama_8b
from benchmarks.compiled_kernels import ATTENTION, PRODUCT, Kernel, kernels

MODULE = """HloModule jit_step

%gathers (table: f32[100,8], ids: s32[4]) -> f32[4,8] {
  %table = f32[100,8]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%table, %ids), offset_dims={1}
}

%writes (pool: bf16[50,2,16,8], both: f32[4,64], at: s32[4,2]) -> bf16[50,2,16,8] {
  %pool = bf16[50,2,16,8]{3,2,1,0} parameter(0)
  %at = s32[4,2]{1,0} parameter(2)
  %both = f32[4,64]{1,0} parameter(1)
  %half = f32[4,16]{1,0} slice(%both), slice={[0:4], [0:16]}
  %new = bf16[4,16]{1,0} convert(%half)
  %shaped = bf16[4,1,2,1,8]{4,3,2,1,0} bitcast(%new)
  ROOT %s = bf16[50,2,16,8]{3,2,1,0} scatter(%pool, %at, %shaped), to_apply=%region
}

%multiplies (x: bf16[4,8], w: bf16[32,8], u: bf16[32,8]) -> f32[4,64] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[32,8]{1,0} parameter(1)
  %u = bf16[32,8]{1,0} parameter(2)
  %c = bf16[64,8]{1,0} concatenate(%w, %u), dimensions={0}
  ROOT %d = f32[4,64]{1,0} dot(%x, %c), lhs_contracting_dims={1}
}

%squares (x: f32[4,8]) -> (f32[4], f32[4,8]) {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[4,8]{1,0} multiply(%x, %x)
  %zero = f32[] constant(0)
  %r = f32[4]{0} reduce(%y, %zero), dimensions={1}, to_apply=%region
  ROOT %t = (f32[4]{0}, f32[4,8]{1,0}) tuple(%r, %y)
}

%rare (args: (f32[4,64])) -> f32[4,64] {
  %args = (f32[4,64]{1,0}) parameter(0)
  %logits = f32[4,64]{1,0} get-tuple-element(%args), index=0
  %sorted = f32[4,64]{1,0} sort(%logits), dimensions={1}
  ROOT %again = f32[4,64]{1,0} sort(%sorted), dimensions={1}
}

%usual (args: (f32[4,64])) -> f32[4,64] {
  %args = (f32[4,64]{1,0}) parameter(0)
  %logits = f32[4,64]{1,0} get-tuple-element(%args), index=0
  ROOT %copied = f32[4,64]{1,0} copy(%logits)
}

ENTRY %main (table: f32[100,8], ids: s32[4], pool: bf16[50,2,16,8]) -> f32[] {
  %table = f32[100,8]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %pool = bf16[50,2,16,8]{3,2,1,0} parameter(2)
  %tables = s32[4,10]{1,0} parameter(3)
  %x = f32[4,8]{1,0} fusion(%table, %ids), kind=kLoop, calls=%gathers
  %q = bf16[4,2,8,8]{3,2,1,0} bitcast(%x)
  %both = f32[4,64]{1,0} fusion(%q, %w, %u), kind=kCustom, calls=%multiplies
  %k = bf16[50,2,16,8]{3,2,1,0} fusion(%pool, %both, %at), kind=kInput, calls=%writes
  %out = (f32[4,2,8,8], f32[4,2,8]) custom-call(%q, %k, %k, %tables, %ids), "mosaic_gpu"
  %n = (f32[4]{0}, f32[4,8]{1,0}) fusion(%x), kind=kInput, calls=%squares
  %args = (f32[4,64]{1,0}) tuple(%both)
  %c = f32[4,64]{1,0} conditional(%p, %args, %args), branch_computations={%rare, %usual}
  ROOT %end = f32[]{} constant(0)
}
"""
NAMES = {
    "w": "bf16[32,8]{1,0}",
    "u": "bf16[32,8]{1,0}",
    "at": "s32[4,2]{1,0}",
    "p": "pred[]",
}
PARAMETERS = "".join(
    f"  %{name} = {shape} parameter({4 + i})\n"
    for i, (name, shape) in enumerate(NAMES.items())
)
MODULE = MODULE.replace(
    "  %x = f32[4,8]{1,0} fusion", PARAMETERS + "  %x = f32[4,8]{1,0} fusion"
)


def listed(text=MODULE):
    return kernels(text, lambda x, ops: gpu_step.attention_kernel(4, 40, x, ops))


def test_kernels_come_in_order_and_of_branches_that_of_fewest():
    kinds = [kernel.kind for kernel in listed()]
    assert kinds == ["fusion", PRODUCT, "fusion", ATTENTION, "fusion", "copy"]


@pytest.mark.parametrize(
    ("place", "read", "written", "operations"),
    [
        (0, 4 * 8 * 4 + 4 * 4, 4 * 8 * 4, 0),  # what is gathered, and the ids
        (1, (4 + 64) * 8 * 2, 4 * 64 * 4, 2 * 4 * 64 * 8),
        # Of the operand the slice, and the places; of the pool nothing but 4 vectors.
        (2, 4 * 16 * 4 + 4 * 2 * 4, 4 * 16 * 2, 0),
        (4, 4 * 8 * 4, 4 * 4 + 4 * 8 * 4, 0),  # read once, used twice; two results
        (5, 4 * 64 * 4, 4 * 64 * 4, 0),
    ],
)
def test_a_kernel_moves_what_it_touches(place, read, written, operations):
    kernel = listed()[place]
    assert (kernel.read, kernel.written) == (read, written)
    assert kernel.operations == operations


def test_an_attention_kernel_reads_the_rows_blocks_and_their_ids():
    kernel = listed()[3]
    blocks = 4 * 3  # of 16 tokens, for 40
    pools = 2 * blocks * 2 * 16 * 8 * 2
    assert kernel.read == 4 * 2 * 8 * 8 * 2 + pools + blocks * 4 + 4 * 4
    assert kernel.written == 4 * 2 * 8 * 8 * 4 + 4 * 2 * 8 * 4


def test_of_an_operand_no_more_is_read_than_there_is():
    text = MODULE.replace(
        "  %new = bf16[4,16]{1,0} convert(%half)\n",
        "  %all = f32[4,64]{1,0} negate(%both)\n"
        "  %new = bf16[4,16]{1,0} made-of(%half, %all)\n",
    )
    assert text != MODULE
    assert listed(text)[2].read == 4 * 64 * 4 + 4 * 2 * 4


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_operations():
    kernel = Kernel(PRODUCT, "", read=3, written=1, operations=60)
    assert kernel.seconds(bandwidth=2, rate=10) == 6
    assert kernel.seconds(bandwidth=0.5, rate=10) == 8


def test_launches_are_cut_behind_attention():
    launches = [Kernel(kind, "", 0, 0) for kind in "ab"]
    attention = Kernel(ATTENTION, "", 0, 0)
    a, b = launches
    between, others = gpu_step.by_place([a, attention, b, attention, b, attention, a])
    assert between == [[b, attention]] * 2
    assert others == [a, attention, a]


def test_the_floor_of_llama_8b():
    floor = gpu_step.floor_bytes(256, 2048, llama_8b.NUM_LAYERS)
    # 8.03 billion parameters less the embedding's 0.53; 131,072 bytes a token.
    assert floor["weights"] == 2 * (8_030_261_248 - 128256 * 4096 + 256 * 4096)
    assert floor["keys and values"] == 256 * 2049 * 131_072
    assert floor["logits"] == 2 * 256 * 128256 * 4
