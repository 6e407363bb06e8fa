"""Which part of a step an instruction belongs to, read off a module's text."""

import pytest

from benchmarks.step_profile import CASES, PARTS, by_part, parts_of

HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "llama.py"

FunctionNames
1 "forward"
2 "RMSNorm.__call__"
3 "MLP.__call__"
4 "multiply"
5 "paged_attention"
6 "_single_queries.<locals>.one_group"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=1 end_column=2}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3 column=1 end_column=2}
4 {file_name_id=1 function_name_id=4 line=4 end_line=4 column=1 end_column=2}
5 {file_name_id=1 function_name_id=5 line=5 end_line=5 column=1 end_column=2}
6 {file_name_id=1 function_name_id=6 line=6 end_line=6 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=2}
6 {file_location_id=6 parent_frame_id=6}


%fused (p.1: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  ROOT %m.1 = f32[8,4]{1,0} multiply(%p.1, %p.1), metadata={stack_frame_id=2}
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %unnamed_fusion = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %dot.7 = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="dot" stack_frame_id=4}
  %exp.2 = f32[8,4]{1,0} exponential(%x), metadata={stack_frame_id=3}
  %while.1 = (s32[], f32[8,4]{1,0}) while(%x), metadata={stack_frame_id=6}
  %max.1 = f32[8]{0} reduce(%x), metadata={stack_frame_id=6}
  %pad.1 = f32[8,8]{1,0} pad(%x), metadata={stack_frame_id=5}
  ROOT %copy.1 = f32[8,4]{1,0} copy(%x), metadata={stack_frame_id=1}
}
"""


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("dot.7", "products"),  # inside the MLP, and yet no activation
        ("exp.2", "activation"),
        ("max.1", "attention: single queries"),  # a function inside that function
        ("pad.1", "attention: rest"),
        ("copy.1", "rest"),
        ("unnamed_fusion", "norms"),  # what it computes says so
        ("while.1", None),
    ],
)
def test_an_instructions_part_is_that_of_the_functions_it_was_traced_in(name, part):
    assert parts_of(HLO)[name] == part


def test_times_are_summed_by_part_and_what_holds_others_is_not_counted():
    took = {"dot.7": 2.0, "exp.2": 0.5, "max.1": 3.0, "while.1": 9.0, "not in it": 7.0}
    assert list(by_part(took, parts_of(HLO)).items()) == [
        ("attention: single queries", 3.0),
        ("products", 2.0),
        ("activation", 0.5),
    ]


def test_every_case_fits_its_bucket_and_every_part_has_a_name_of_its_own():
    for case in CASES.values():
        assert len(case.q_lens) == len(case.kv_lens) <= case.rows
        assert sum(case.q_lens) <= case.tokens
    assert len({name for name, _ in PARTS}) == len(PARTS)
