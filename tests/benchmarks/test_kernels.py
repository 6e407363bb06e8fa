"""The kernel benchmark, as far as it goes without a GPU."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import (
    device_time,
    kernel_cases,
    kernel_peers,
    kernel_report,
    kernels,
)
from benchmarks.device_time import Event
from benchmarks.kernel_cases import Case
from pallas_kernels.reference import dequantised

SMALL = Case(((1, 17), (3, 32)), q_heads=4, kv_heads=2, head_dim=64, block_size=16)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # 2 + 2 blocks of K and V, 2 heads, 16 slots, 64 values of 2 bytes; then queries
        # and outputs of 4 tokens and 4 heads.
        (SMALL, 4 * 2 * 2 * 16 * 64 * 2 + 2 * 4 * 4 * 64 * 2),
        # 2.147 GB and 1 MiB.
        (kernel_cases.grid()["decode-64x8192-kv8"], 2_147_483_648 + 1_048_576),
        # 132 and 72 bytes a vector where those are 256.
        (kernel_cases.grid()["decode-64x8192-kv8-int8"], 1_107_296_256 + 1_048_576),
        (kernel_cases.grid()["decode-64x8192-kv8-int4"], 603_979_776 + 1_048_576),
    ],
)
def test_bytes_are_those_of_live_blocks_queries_and_outputs(case, expected):
    assert kernel_cases.moved_bytes(case) == expected


def test_operations_are_those_of_visible_keys():
    # The row of 3 queries sees 30, 31 and 32 keys.
    assert kernel_cases.operations(SMALL) == 4 * (17 + 30 + 31 + 32) * 4 * 64


def test_sets_of_inputs_share_no_block_and_lie_in_random_order():
    inputs = kernel_cases.make_inputs(SMALL, seed=3, num_sets=5)
    tables = np.asarray(inputs.block_tables)
    assert tables.shape == (5, 2, 2)
    assert sorted(tables.flat) == list(range(1, 21))
    assert [sorted(table.flat) for table in tables[:2]] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert list(tables.flat) != sorted(tables.flat)
    assert inputs.k_blocks.shape[1:] == (2, 16, 64)
    assert len(inputs.k_blocks) >= 21
    np.testing.assert_array_equal(inputs.cu_q_lens, [0, 1, 4])
    values = np.asarray(inputs.v_blocks, np.float32)
    assert abs(values.std() - 1) < 0.05
    assert not np.array_equal(values, np.asarray(inputs.k_blocks, np.float32))
    others = kernel_cases.make_inputs(SMALL, seed=4, num_sets=5)
    assert not np.array_equal(inputs.q[0], others.q[0])


@pytest.mark.parametrize("kv_format", kernel_cases.FORMATS)
def test_quantised_inputs_stand_for_normal_values(kv_format):
    case = dataclasses.replace(SMALL, kv_format=kv_format)
    inputs = kernel_cases.make_inputs(case, seed=3, num_sets=5)
    for name, blocks in (("k", inputs.k_blocks), ("v", inputs.v_blocks)):
        values = np.asarray(dequantised(blocks, inputs.scales[f"{name}_scales"]))
        assert values.shape[1:] == (2, 16, 64)
        assert abs(values.std() - 1) < 0.05
        held = sum(x[:1].nbytes for x in (blocks, inputs.scales[f"{name}_scales"]))
        assert 2 * held == case.block_bytes


def test_expected_outputs_are_the_whole_batch_s_by_the_reference():
    inputs = kernel_cases.make_inputs(SMALL, seed=0, num_sets=5)
    q, *others = inputs.arguments(1)
    whole = pallas_kernels.paged_attention_reference(
        q.astype(jnp.float32), *others, scale=SMALL.scale
    )
    found = kernels.expected_outputs(SMALL, inputs, 1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, whole, atol=2e-6)


def test_an_error_is_relative_to_its_token_s_root_mean_square():
    expected = jnp.concatenate([jnp.ones((1, 2, 8)), jnp.full((1, 2, 8), 0.01)])
    out = expected.at[1, 1, 3].add(0.002)
    assert kernels.relative_error(out, expected) == pytest.approx(0.2, rel=1e-4)
    assert np.isnan(kernels.relative_error(out.at[0, 0, 0].set(np.nan), expected))


LAUNCHES = [
    *(Event("fusion", 9.0), Event("a_mosaic_gpu_kernel", 9.0)),  # discarded
    *(Event("fusion", 1.0), Event("a_mosaic_gpu_kernel", 4.0)),
    *(Event("a_mosaic_gpu_kernel", 2.0), Event("fusion", 2.0)),
    *(Event("fusion", 1.0), Event("a_mosaic_gpu_kernel", 30.0)),
]


def test_a_time_is_the_median_of_launches_and_mosaic_s_share_apart():
    found = device_time.summarize(LAUNCHES, 4, num_discarded=1)
    assert found == device_time.DeviceTime(
        seconds=5.0, mosaic_seconds=4.0, num_launches=3, num_kernels=2
    )
    assert device_time.summarize([Event("fusion", 2.0)], 1).mosaic_seconds is None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (LAUNCHES[:-1], "7 events of 4 like launches"),
        ([], "0 events of 4 like launches"),
        (
            [*LAUNCHES[:-1], Event("fusion", 1.0)],
            "4 launches did not run the same kernels",
        ),
    ],
)
def test_events_that_are_not_of_like_launches_are_refused(events, message):
    with pytest.raises(ValueError, match=message):
        device_time.summarize(events, 4)


def test_device_events_are_those_of_the_gpu_s_streams_in_order():
    text = """
    planes { name: "/device:GPU:0"
      lines { name: "Stream #13(Compute)" timestamp_ns: 1000
        events { metadata_id: 1 offset_ps: 9000000 duration_ps: 5000000 } }
      lines { name: "Stream #14(MemcpyD2D)" timestamp_ns: 1000
        events { metadata_id: 2 offset_ps: 1000000 duration_ps: 2000000 } }
      lines { name: "XLA Modules" timestamp_ns: 1000
        events { metadata_id: 1 offset_ps: 9000000 duration_ps: 5000000 } }
      event_metadata { key: 1 value { id: 1 name: "kernel" } }
      event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } } }
    planes { name: "/host:CPU"
      lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 5000000 } }
      event_metadata { key: 1 value { id: 1 name: "host" } } }
    """
    data = jax.profiler.ProfileData
    profile = data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text))
    names, seconds = zip(*device_time.device_events(profile), strict=True)
    assert names == ("MemcpyD2D", "kernel")
    assert seconds == pytest.approx((2e-6, 5e-6))


def prepared(function, setting=""):
    return kernel_peers.Prepared(setting, function, [(0,), (1,)], lambda out: out)


@pytest.fixture
def measured(monkeypatch):
    """measured(*functions): measure an implementation with these settings."""
    expected = jnp.ones((2, 4, 8))
    copy = device_time.Copy("fake", 2e12, 2e12)
    taken = []

    def timer(launch):
        launch()
        seconds = taken.pop(0)
        return [Event("k_mosaic_gpu", seconds)] * (1 + device_time.MAX_LAUNCHES)

    def run(*functions, seconds=(), timed=True):
        taken[:] = seconds
        monkeypatch.setitem(device_time.TIMERS, "fake", timer)
        monkeypatch.setitem(
            kernel_peers.IMPLEMENTATIONS,
            "tried",
            lambda case, inputs, interpret: [
                prepared(function, f"setting {number}")
                for number, function in enumerate(functions)
            ],
        )
        case = kernel_cases.INTERPRETED["decode-interpreted"]
        inputs = kernel_cases.make_inputs(case, 0, 1)
        return kernels.measure(
            "tried", case, inputs, expected, None, copy if timed else None
        )

    return run


def right(index):
    return jnp.ones((2, 4, 8))


def test_the_fastest_setting_counts(measured):
    outcome = measured(right, right, right, seconds=[3e-6, 1e-6, 2e-6])
    assert outcome == {
        "error": 0.0,
        "us": 1.0,
        "kernel_us": 1.0,
        "launches": device_time.MAX_LAUNCHES,
        "kernels": 1,
        "setting": "setting 1",
        "problem": None,
    }


def test_launches_rotate_between_the_sets_of_inputs(measured):
    seen = []

    def function(index):
        seen.append(index)
        return right(index)

    measured(function, seconds=[1e-6])
    # The check has the last set, then they alternate.
    assert seen[:6] == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda index: 1.1 * right(index), "error 0.1000, more than 0.05"),
        (lambda index: np.nan * right(index), "error nan, more than 0.05"),
        (lambda index: [][index], "IndexError: list index out of range"),
    ],
)
def test_what_is_wrong_is_reported_and_gets_no_time(measured, function, problem):
    outcome = measured(right, function, seconds=[1e-6])
    assert outcome["problem"] == problem
    assert outcome["us"] is outcome["kernel_us"] is outcome["launches"] is None


def record(**changes):
    peer = {"us": None, "problem": "ImportError: no such module"}
    return {
        "case": "decode-2x512-kv8",
        "rows": 2,
        "longest": 512,
        "kv_heads": 8,
        "decode": True,
        "bytes": 4_194_304,
        "predicted_h200_us": 0.9,
        "us": 2.0,
        "kernel_us": 1.5,
        "share_of_copy": 0.5,
        "share_of_peak": 0.44,
        "problem": None,
        "peers": {"xla": {"us": 25.0}, "jax_triton": {"us": 3.1}, "cudnn": peer},
        "copy_bytes_per_s": 4.2e12,
        "jax": "0.12.0.1",
        "device": "NVIDIA H200",
        "date": "2026-11-29T12:00:00+00:00",
        **changes,
    }


def test_shares_are_of_the_copy_and_of_the_card_s_peak():
    # 1 GB in 500 us is 2 TB/s; the kernel alone takes 250 us.
    timed = record(bytes=10**9, operations=10**9, us=500.0, kernel_us=250.0)
    copy = device_time.Copy("profile", 4e12, 4e12)
    assert kernels.shares(timed, copy) == {
        "timer": "profile",
        "copy_bytes_per_s": 4e12,
        "peak_bytes_per_s": 4.8e12,
        "share_of_copy": 0.5,
        "kernel_share_of_copy": 1.0,
        "share_of_peak": 0.4167,
        "kernel_share_of_peak": 0.8333,
        "tera_operations_per_s": 2.0,
    }
    unknown = kernels.shares(timed | {"device": "another", "us": None}, copy)
    assert unknown["share_of_copy"] is unknown["kernel_share_of_peak"] is None
    assert unknown["kernel_share_of_copy"] == 1.0


NO_TIME = {
    "us": None,
    "kernel_us": None,
    "share_of_copy": None,
    "share_of_peak": None,
    "problem": "error 0.5000, more than 0.05",
}


def test_the_table_has_peers_as_multiples_and_says_what_failed():
    assert kernel_report.table([record(), record(case="other", **NO_TIME)]) == (
        "NVIDIA H200, jax 0.12.0.1, 2026-11-29, copy 4.20 TB/s\n"
        "\n"
        "| case | MB | ideal us | us | kernel us | of copy | of peak "
        "| xla | jax_triton | cudnn |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| decode-2x512-kv8 | 4 | 0.9 | 2.0 | 1.5 | 50% | 44% "
        "| 12.50x | 1.55x | - |\n"
        "| other | 4 | 0.9 | error 0.5000, more than 0.05 | - | - | - | - | - | - |"
    )


def test_files_replace_those_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    for name in ("kernels.jsonl", "kernels.png"):
        (folder / name).write_text("earlier")
    remarks = kernel_report.write([record(), record(case="other", **NO_TIME)], folder)
    assert remarks == [
        "No plot: matplotlib is not installed; it is in the dependency group `bench`."
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        "kernels.jsonl",
        "kernels.md",
    ]
    lines = (folder / "kernels.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["decode-2x512-kv8", "other"]
    assert "NVIDIA H200" in (folder / "kernels.md").read_text()


def test_without_a_gpu_it_says_so_and_has_status_2(capsys):
    assert kernels.main(["--quick"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("The kernels cannot run on a device of kind cpu: ")
    assert printed.err.count("\n") == 1


def test_quick_is_15_cases_of_the_grid(capsys):
    assert kernels.main(["--list"]) == 0
    everything = capsys.readouterr().out.splitlines()
    assert kernels.main(["--list", "--quick"]) == 0
    quick = capsys.readouterr().out.splitlines()
    assert len(quick) == 15
    assert set(quick) < set(everything)
    assert len(set(everything)) == len(everything) == 2 * (10 * 6 + 7 + 4 * 3)
    assert {"decode-512x16384-kv4", "decode-64x8192-kv8"} <= set(everything)


def test_an_unknown_case_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["--list", "--cases", "decode-64x8192-kv8", "no-such"])
    assert "no such cases: no-such" in capsys.readouterr().err


def test_cases_that_do_not_fit_are_left_out_by_name(monkeypatch, capsys):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7 * 10**9})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    cases = kernel_cases.grid()
    names = ("decode-64x8192-kv8", "decode-64x16384-kv8")
    fitting = kernels._those_that_fit({name: cases[name] for name in names})
    assert list(fitting) == ["decode-64x8192-kv8"]
    assert capsys.readouterr().err == (
        "Left out decode-64x16384-kv8: it needs 9 GB and JAX has 7 GB.\n"
    )


def test_an_interrupt_keeps_what_was_printed(monkeypatch, capsys):
    def run_case(name, case, **setup):
        if name == "prefill-interpreted":
            raise KeyboardInterrupt
        return record(case=name)

    monkeypatch.setattr(kernels, "run_case", run_case)
    assert kernels.main(["--interpret"]) == 130
    printed = capsys.readouterr()
    assert json.loads(printed.out)["case"] == "decode-interpreted"
    assert "Interrupted after 1 of 5 cases." in printed.err


def test_a_failed_case_makes_the_exit_status_1(monkeypatch, capsys):
    def run_case(name, case, **setup):
        return record(case=name, **(NO_TIME if name == "decode-interpreted" else {}))

    monkeypatch.setattr(kernels, "run_case", run_case)
    assert kernels.main(["--interpret"]) == 1
    printed = capsys.readouterr()
    assert "Failed: decode-interpreted.\n" in printed.err
    assert printed.out.splitlines()[-1].startswith("| decode-interpreted-int4 |")


def test_tiny_cases_run_in_the_interpreter(tmp_path, capsys):
    arguments = ["--interpret", "--cases", "decode-interpreted", "--seed", "5"]
    with jax.numpy_rank_promotion("allow"):  # in JAX's own kernel
        assert kernels.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    line = printed.out.splitlines()[0]
    found = json.loads(line)
    assert 0 < found["error"] < found["tolerance"] == 0.05
    assert found["us"] is found["problem"] is found["share_of_copy"] is None
    assert found["case"] == "decode-interpreted"
    assert found["seed"] == 5
    assert found["jax"] == jax.__version__
    for peer in ("xla", "jax_triton"):
        assert found["peers"][peer]["problem"] is None
        assert 0 < found["peers"][peer]["error"] < 0.05
    assert "has no interpreter" in found["peers"]["cudnn"]["problem"]
    assert (tmp_path / "out" / "kernels.jsonl").read_text() == f"{line}\n"
    assert "No plot: no decode case has a time." in printed.err
