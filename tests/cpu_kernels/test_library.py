import ctypes
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpu_kernels
from cpu_kernels import library
from jaxkv import paged_attention
from jaxkv.device import attention, dense
from tests.cpu_kernels.kernel_cases import ROOT, build_constant
from tests.helpers import (
    TOLERANCE,
    Workload,
    dense_attention,
    random_paged_case,
)

FEATURES = frozenset().union(*cpu_kernels.INSTRUCTION_SETS.values())


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Return a function that makes up a machine and what was compiled for it."""

    def choose(features, compiled):
        for name in compiled:
            (tmp_path / f"{name}.so").touch()
        monkeypatch.setattr(library, "_FOLDER", tmp_path)
        monkeypatch.setattr(library, "_cpu_features", lambda: frozenset(features))
        library.load.cache_clear()
        dense._log_once.cache_clear()
        attention._log_once.cache_clear()

    yield choose
    library.load.cache_clear()


def test_an_instruction_set_needs_all_its_features_and_its_library(pretend):
    names = tuple(cpu_kernels.INSTRUCTION_SETS)
    pretend(FEATURES, names)
    assert cpu_kernels.supported_instruction_sets() == names
    for missing in ("amx_tile", "amx_bf16"):
        pretend(FEATURES - {missing}, names)
        assert cpu_kernels.supported_instruction_sets() == names[1:]
    pretend(FEATURES - {"avx512_bf16"}, names)
    assert cpu_kernels.supported_instruction_sets() == ("avx512", "avx2")
    for missing in ("avx512f", "avx512bw", "avx512vl", "avx512dq"):
        pretend(FEATURES - {missing}, names)
        assert cpu_kernels.supported_instruction_sets() == ("avx2",)
    for missing in ("avx2", "fma", "f16c"):
        pretend(FEATURES - {missing}, names)
        assert cpu_kernels.supported_instruction_sets() == names[:-1]


@pytest.mark.parametrize(
    ("features", "compiled", "message"),
    [
        ((), ("avx2", "avx512"), "a CPU without AVX2"),
        (FEATURES, (), "kernels that were not compiled when jaxkv was installed"),
    ],
)
def test_without_kernels_xla_computes_and_one_line_says_so(
    pretend, caplog, features, compiled, message
):
    pretend(features, compiled)
    x, w = jnp.ones((2, 4)), jnp.ones((3, 4))
    case = random_paged_case(Workload(rows=((1, 5),)))
    arrays = (jnp.asarray(case.q), *case.cache.layers[0], *case.arguments().values())
    with pytest.raises(NotImplementedError, match=message):
        cpu_kernels.multiply(x, w)
    with pytest.raises(NotImplementedError, match=message):
        cpu_kernels.rms_norm(w, x[0], eps=0.0)
    with pytest.raises(NotImplementedError, match=message):
        cpu_kernels.paged_attention(*arrays, scale=1.0)

    @jax.jit
    def compute(x, w, q, cache, arguments):
        y = dense.multiply(x, w) + dense.multiply(x, w, result_dtype="float32")
        y += (dense.rms_norm(w, x[0], eps=0.0),)
        return y, paged_attention(q, cache, 0, **arguments)

    ys, out = compute(x, w, jnp.asarray(case.q), case.cache, case.arguments())
    compute.lower(x[:1], w, jnp.asarray(case.q), case.cache, case.arguments())
    for y, expected in zip(ys, (4, 4, 1), strict=True):
        np.testing.assert_array_equal(y, np.full(y.shape, expected))
    expected, _ = dense_attention(case)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE["float32"], rtol=0)
    assert [record.getMessage() for record in caplog.records] == [
        f"cpu_kernels cannot do this, but XLA can: {message}",
        f"paged_attention: cpu cannot do this: {message}",
    ]


def test_a_library_that_does_not_load_is_as_none(pretend):
    pretend(FEATURES, ("avx2",))  # an empty file
    with pytest.raises(NotImplementedError, match=r"do not load; install jaxkv again"):
        cpu_kernels.multiply(jnp.ones((2, 4)), jnp.ones((3, 4)))
    assert not cpu_kernels.is_available("float32")


def test_a_named_instruction_set_that_is_not_there_is_refused(pretend):
    pretend(FEATURES - {"avx512_bf16"}, ("avx512",))
    for name in ("avx512_bf16", "avx2", "neon"):
        with pytest.raises(NotImplementedError, match=rf"{name}.*\('avx512',\)"):
            cpu_kernels.multiply(
                jnp.ones((2, 4)), jnp.ones((3, 4)), instruction_set=name
            )


def test_the_fastest_is_taken(monkeypatch):
    monkeypatch.delenv("JAXKV_INSTRUCTION_SET", raising=False)
    library.load.cache_clear()
    supported = cpu_kernels.supported_instruction_sets()
    if not supported:
        pytest.skip("no kernels for this machine, or none compiled")
    text = jax.jit(cpu_kernels.multiply).lower(jnp.ones((2, 4)), jnp.ones((3, 4)))
    assert f"jaxkv_multiply_{supported[0]}" in text.as_text()


def test_the_environment_names_another(monkeypatch):
    supported = cpu_kernels.supported_instruction_sets()
    if not supported:
        pytest.skip("no kernels for this machine, or none compiled")
    x, w = jnp.ones((2, 4)), jnp.ones((3, 4))
    try:
        monkeypatch.setenv("JAXKV_INSTRUCTION_SET", supported[-1])
        library.load.cache_clear()
        text = jax.jit(lambda *a: cpu_kernels.multiply(*a)).lower(x, w).as_text()
        assert f"jaxkv_multiply_{supported[-1]}" in text
        monkeypatch.setenv("JAXKV_INSTRUCTION_SET", "neon")
        library.load.cache_clear()
        with pytest.raises(ValueError, match="JAXKV_INSTRUCTION_SET is 'neon'; this"):
            dense.multiply(x, w)
    finally:
        library.load.cache_clear()


def test_features_are_read_from_linux(monkeypatch):
    read = library._cpu_features.__wrapped__
    text = "processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: x\nflags\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert read() == {"fpu", "avx2", "fma"}
    monkeypatch.setattr(Path, "read_text", lambda path: "Features : fp asimd\n")
    assert read() == frozenset()

    def fail(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", fail)
    assert read() == frozenset()


def test_hatch_build_compiles_every_instruction_set():
    flags = build_constant("FLAGS")
    assert set(build_constant("OPTIONAL")) <= set(flags)
    assert set(flags) == set(cpu_kernels.INSTRUCTION_SETS)
    for name, features in cpu_kernels.INSTRUCTION_SETS.items():
        used = {flag.removeprefix("-m") for flag in flags[name].split()}
        used = {"avx512_bf16" if flag == "avx512bf16" else flag for flag in used}
        used = {flag.replace("amx-", "amx_") for flag in used}
        # What the compiler may use, Linux must have named; it has FMA with AVX-512.
        assert used - {"fma"} == set(features) - {"fma"}


def test_every_library_has_all_handlers(instruction_set):
    loaded = ctypes.CDLL(str(library._FOLDER / f"{instruction_set}.so"))
    for handler in library._HANDLERS:
        assert getattr(loaded, handler)


CALLS = """
import functools, hashlib, sys
import jax, jax.numpy as jnp, numpy as np
import cpu_kernels

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
rng = np.random.default_rng(0)
x, w, q, k, v = (
    rng.standard_normal(shape, np.float32)
    for shape in ((5, 33), (7, 33), (3, 4, 40), (4, 2, 8, 40), (4, 2, 8, 40))
)
tables, lens, starts = (
    np.array(a, np.int32) for a in ([[1, 2], [3, 0]], [12, 5], [0, 2, 3])
)

@jax.jit
def compute(*arrays):
    y = cpu_kernels.multiply(*arrays[:2])
    return *y, *cpu_kernels.paged_attention(*arrays[2:], scale=0.2, return_lse=True)

executable = compute.lower(x, w, q, k, v, tables, lens, starts).compile()
results = executable(x, w, q, k, v, tables, lens, starts)
assert not any(np.isnan(a).any() for a in results)
digest = hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in results))
print(len(hits), digest.hexdigest())
"""


def test_an_executable_from_the_compilation_cache_gives_the_same_bits(tmp_path):
    if not cpu_kernels.supported_instruction_sets():
        pytest.skip("no kernels for this machine, or none compiled")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment = kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run():
        process = subprocess.run(
            [sys.executable, "-c", CALLS],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.split()

    compiled_hits, compiled = run()
    cached_hits, cached = run()
    assert (compiled_hits, cached_hits) == ("0", "1")
    assert cached == compiled


def test_an_exported_function_computes_the_same():
    """Who exports must allow the kernels by name; JAX promises nothing for them."""
    if not cpu_kernels.supported_instruction_sets():
        pytest.skip("no kernels for this machine, or none compiled")
    x, w = (
        jnp.asarray(np.random.default_rng(n).standard_normal((n, 33), np.float32))
        for n in (5, 7)
    )
    function = jax.jit(cpu_kernels.multiply)
    with pytest.raises(ValueError, match="jaxkv_multiply"):
        jax.export.export(function)(x, w)
    name = f"jaxkv_multiply_{cpu_kernels.supported_instruction_sets()[0]}"
    check = jax.export.DisabledSafetyCheck.custom_call(name)
    exported = jax.export.export(function, disabled_checks=[check])(x, w)
    for result, expected in zip(exported.call(x, w), function(x, w), strict=True):
        np.testing.assert_array_equal(result, expected)
