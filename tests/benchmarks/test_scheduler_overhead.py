from benchmarks import scheduler_overhead


def test_every_row_runs_in_every_step_and_nothing_is_left_to_collect():
    line = scheduler_overhead.measure(rows=8, steps=40, num_blocks=1000)
    assert (line["num_blocks"], line["rows"], line["garbage_objects"]) == (1000, 8, 0)
    assert line["step_ms_max"] >= line["step_ms_median"] > 0
