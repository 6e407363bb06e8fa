import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpu_kernels
from jaxkv import paged_attention
from jaxkv.device import attention as attention_module
from tests.helpers import (
    TOLERANCE,
    Workload,
    dense_attention,
    low_bit_paged_case,
    random_paged_case,
)


def attend(q, k, v, tables, kv_lens, cu_q_lens, **options):
    """Return outputs and log-sum-exp as numpy; numbers are as in the kernel."""
    options.setdefault("scale", q.shape[-1] ** -0.5)
    options.setdefault("return_lse", True)
    call = jax.jit(functools.partial(cpu_kernels.paged_attention, **options))
    arrays = [jnp.asarray(a, "int32") for a in (tables, kv_lens, cu_q_lens)]
    out, lse = call(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), *arrays)
    return np.asarray(out), np.asarray(lse)


def run(case, **options):
    k, v = case.cache.layers[0]
    rows = (case.block_tables, case.kv_lens, case.cu_q_lens)
    return attend(case.q, k, v, *rows, **options)


def check(case, **options):
    """Compare with softmax in float64 over what the case's arrays hold."""
    out, lse = run(case, **options)
    options.pop("instruction_set", None)
    exact = dataclasses.replace(case, q=np.asarray(case.q, np.float32))
    expected_out, expected_lse = dense_attention(exact, **options)
    assert out.dtype == case.q.dtype
    bound = np.full(out.shape, TOLERANCE["float32"])
    if out.dtype == jnp.bfloat16:
        bound += 2.0**-8 * (np.abs(expected_out) + bound)  # rounded once more
    assert (np.abs(out.astype(np.float64) - expected_out) <= bound).all()
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE["float32"], rtol=0)


# Lengths straddle blocks, tiles of 64 keys and tasks of 16 queries; groups of heads
# leave every rest of 3 and of 6 queries; head_dims are multiples of 8, of 16 and of
# neither; pools hold NaN where no token was written.
CASES = [
    (Workload(rows=((1, 1), (1, 8), (1, 7), (1, 9)), head_dim=40), {}),
    (
        Workload(
            rows=((0, 0), (1, 63), (1, 64), (1, 65), (0, 9), (1, 129), (1, 0)),
            q_heads=6,
            head_dim=64,
            block_size=16,
            padding_rows=2,
            padding_tokens=5,
        ),
        {},
    ),
    (
        Workload(
            rows=((15, 15), (16, 80), (17, 17), (33, 130), (2, 2)),
            q_heads=3,
            kv_heads=1,
            head_dim=80,
            block_size=24,
        ),
        {},
    ),
    (
        Workload(
            rows=((1, 67), (5, 66), (0, 3)),
            q_heads=8,
            kv_heads=2,
            head_dim=96,
            block_size=1,
            padding_tokens=1,
        ),
        {"soft_cap": 1.5, "scale": 0.4},
    ),
    (
        Workload(
            rows=((1, 200), (20, 140), (1, 70), (3, 3)),
            q_heads=8,
            kv_heads=1,
            head_dim=128,
            block_size=24,
        ),
        {"window": 65},
    ),
    (
        Workload(rows=((35, 140), (1, 66)), q_heads=2, head_dim=6, block_size=16),
        {"window": 1},
    ),
    (
        Workload(rows=((18, 18), (1, 131)), q_heads=7, kv_heads=1, head_dim=16),
        {"window": 64, "soft_cap": 30.0, "scale": 0.3},
    ),
    # More rows than there are runs of tasks, so that a thread does some in turn.
    (
        Workload(rows=((1, 3), (1, 70), (2, 9)) * 15, q_heads=6, kv_heads=3),
        {"window": 6},
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("workload", "options"), CASES)
def test_equals_dense_softmax(instruction_set, workload, options, dtype):
    case = random_paged_case(workload, dtype=dtype)
    case = dataclasses.replace(case, q=np.asarray(jnp.asarray(case.q, dtype)))
    check(case, instruction_set=instruction_set, **options)


@pytest.mark.parametrize(
    ("q_dtype", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_queries_and_pool_may_differ_in_dtype(instruction_set, q_dtype, dtype):
    workload, options = CASES[3]
    case = random_paged_case(workload, dtype=dtype)
    case = dataclasses.replace(case, q=np.asarray(jnp.asarray(case.q, q_dtype)))
    check(case, instruction_set=instruction_set, **options)


VARIANTS = [
    ("float32", {}),
    ("bfloat16", {"window": 5}),
    ("bfloat16", {"window": 70, "soft_cap": 3.0}),
]


def single_row(workload, dtype):
    """Return q, k, v, the row's blocks and its kv_len."""
    case = random_paged_case(workload, dtype=dtype)
    k, v = case.cache.layers[0]
    blocks = -(-case.kv_lens[0] // workload.block_size)
    table = case.block_tables[0, :blocks]
    return jnp.asarray(case.q, dtype), k, v, table, int(case.kv_lens[0])


@pytest.mark.parametrize(("dtype", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize(
    "workload",
    [
        # What is read in place: whole vectors, and at most 3 or 6 heads of a query.
        Workload(rows=((90, 150),), q_heads=3, kv_heads=1, head_dim=64, block_size=8),
        Workload(rows=((40, 90),), q_heads=8, kv_heads=2, head_dim=80, block_size=24),
        Workload(rows=((40, 90),), q_heads=2, kv_heads=2, head_dim=6, block_size=1),
    ],
    ids=lambda w: w.name,
)
def test_a_query_gets_the_same_bits_among_any_others(
    instruction_set, workload, dtype, options
):
    q, k, v, table, kv_len = single_row(workload, dtype)
    options = {"instruction_set": instruction_set, **options}
    tokens = len(q)
    # Each query as a row of its own, all in one call: their last keys differ.
    first_len = kv_len - tokens + 1
    out, lse = attend(
        q,
        k,
        v,
        np.tile(table, (tokens, 1)),
        np.arange(first_len, kv_len + 1),
        np.arange(tokens + 1),
        **options,
    )
    # Alone in the call.
    for token in (0, tokens - 1):
        results = attend(
            q[token : token + 1],
            k,
            v,
            table[None],
            [first_len + token],
            [0, 1],
            **options,
        )
        same_bits(results, (out[[token]], lse[[token]]))
    # In prefill, whole and in parts, beside a row of another length.
    for size in (tokens, 3, 7, 17):
        ends = [*range(size, tokens, size), tokens]
        q_lens = np.diff([0, *ends])
        results = attend(
            jnp.concatenate([q[:2], q]),
            k,
            v,
            np.tile(table, (1 + len(ends), 1)),
            [2, *(first_len - 1 + np.array(ends))],
            np.cumsum([0, 2, *q_lens]),
            **options,
        )
        same_bits([a[2:] for a in results], (out, lse))


@pytest.mark.parametrize(("dtype", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize(("kv_heads", "tokens"), [(1, 1), (1, 20), (2, 1)])
def test_where_blocks_lie_does_not_change_a_bit(
    instruction_set, kv_heads, tokens, dtype, options
):
    """With one KV head, keys in blocks that follow each other lie side by side."""
    workload = Workload(
        rows=((tokens, 150),), q_heads=2, kv_heads=kv_heads, head_dim=64, block_size=24
    )
    q, k, v, table, kv_len = single_row(workload, dtype)
    results = []
    for order in (np.arange(1, 8), np.arange(1, 8)[::-1], np.array(table)):
        moved = [jnp.full_like(a, np.nan).at[order].set(a[table]) for a in (k, v)]
        results.append(
            attend(
                q,
                *moved,
                order[None],
                [kv_len],
                [0, tokens],
                instruction_set=instruction_set,
                **options,
            )
        )
    for other in results[1:]:
        same_bits(other, results[0])


def same_bits(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        bits = f"u{result.dtype.itemsize}"
        np.testing.assert_array_equal(
            np.ascontiguousarray(result).view(bits),
            np.ascontiguousarray(wanted).view(bits),
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_unused_slots_do_not_change_a_bit(instruction_set, value):
    workload = Workload(
        rows=((1, 1), (3, 66), (1, 63), (0, 5), (1, 0)), head_dim=40, padding_tokens=2
    )
    clean = run(
        random_paged_case(workload, unused=0.0), instruction_set=instruction_set
    )
    dirty = run(
        random_paged_case(workload, unused=value), instruction_set=instruction_set
    )
    same_bits(dirty, clean)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_nan_and_infinity_stay_in_their_row_and_head(instruction_set, side, value):
    workload = Workload(
        rows=((1, 70), (20, 70), (1, 70)), q_heads=6, kv_heads=3, head_dim=40
    )
    case = random_paged_case(workload)
    k, v = map(np.array, case.cache.layers[0])
    q = case.q.copy()
    rows = (case.block_tables, case.kv_lens, case.cu_q_lens)
    clean = attend(q, k, v, *rows, instruction_set=instruction_set)
    # The second row's first query: position 50, KV head 1.
    place = (case.block_tables[1, 50 // 8], 1, 50 % 8, 3)
    changed = np.zeros(clean[0].shape, bool)
    if side == "q":
        q[1, 2, 3] = value
        changed[1, 2] = True
    else:
        {"k": k, "v": v}[side][place] = value
        changed[1:21, 2:4] = True
    out, lse = attend(q, k, v, *rows, instruction_set=instruction_set)
    same_bits(
        (out[~changed], lse[~changed[..., 0]]),
        (clean[0][~changed], clean[1][~changed[..., 0]]),
    )
    if side == "v":  # of all that see it, in one element
        changed[..., :3] = changed[..., 4:] = False
        same_bits((lse,), clean[1:])
    assert not np.isfinite(out[changed]).any() or (side, value) == ("k", np.inf)
    if value is np.nan:
        np.testing.assert_array_equal(np.isnan(out), changed)


@pytest.mark.parametrize(
    ("side", "value"), [("k", np.nan), ("k", -np.inf), ("k", 1e30), ("v", 3e38)]
)
@pytest.mark.parametrize(("seen", "window"), [("earlier", 4), ("later", None)])
def test_keys_that_a_query_does_not_see_do_not_change_a_bit(
    instruction_set, seen, window, side, value
):
    """Queries computed together see different keys of a tile."""
    case = random_paged_case(Workload(rows=((12, 30),), head_dim=40))
    arrays = dict(zip("kv", map(np.array, case.cache.layers[0]), strict=True))
    rows = (case.block_tables, case.kv_lens, case.cu_q_lens)
    options = {"window": window, "instruction_set": instruction_set}
    clean = attend(case.q, arrays["k"], arrays["v"], *rows, **options)
    position = 20  # that of the third query
    arrays[side][case.block_tables[0, position // 8], :, position % 8] = value
    results = attend(case.q, arrays["k"], arrays["v"], *rows, **options)
    unseen = slice(6, None) if seen == "earlier" else slice(2)
    same_bits([a[unseen] for a in results], [a[unseen] for a in clean])
    assert (results[0][2:6] != clean[0][2:6]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("wrong", [-1, 1000, -(2**31), 2**31 - 1])
def test_block_ids_outside_the_pool_are_clamped(instruction_set, wrong):
    case = random_paged_case(Workload(rows=((1, 30), (20, 70), (1, 9)), head_dim=40))
    tables = case.block_tables.copy()
    tables[1, 2:5] = wrong
    tables[2, 1:] = wrong
    nearest = np.clip(tables, 0, case.cache.layers[0].k.shape[0] - 1)
    results, expected = (
        run(
            dataclasses.replace(case, block_tables=ids), instruction_set=instruction_set
        )
        for ids in (tables, nearest)
    )
    assert np.isfinite(results[1][0]).all()  # a row of its own blocks only
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("kv_len", [41, 64, 65, 1000, 2**31 - 1])
def test_a_kv_len_past_the_table_does_not_crash(instruction_set, kv_len):
    case = random_paged_case(Workload(rows=((3, 40), (1, 9)), head_dim=40), unused=0.0)
    longer = dataclasses.replace(case, kv_lens=np.array([kv_len, 9], np.int32))
    results = run(longer, instruction_set=instruction_set)
    expected = run(case, instruction_set=instruction_set)
    same_bits([a[3:] for a in results], [a[3:] for a in expected])


@pytest.mark.parametrize("starts", [(0, 5), (0, 10**6), (0, -5), (-3, 2), (-9, -8)])
def test_cu_q_lens_outside_the_tokens_do_not_crash(instruction_set, starts):
    """They are clamped: an output outside the array must not be written."""
    case = random_paged_case(Workload(rows=((2, 9),)))
    arrays = (*case.cache.layers[0], case.block_tables, case.kv_lens)
    results, expected = (
        attend(case.q, *arrays, ends, instruction_set=instruction_set)
        for ends in (starts, np.clip(starts, 0, 2))
    )
    same_bits(results, expected)


def test_tokens_before_the_first_row_are_padding_too(instruction_set):
    case = random_paged_case(Workload(rows=((2, 9),)))
    arrays = (*case.cache.layers[0], case.block_tables, case.kv_lens)
    q = np.concatenate([case.q, case.q])
    out, lse = attend(q, *arrays, [2, 4], instruction_set=instruction_set)
    np.testing.assert_array_equal(out[:2], 0.0)
    np.testing.assert_array_equal(lse[:2], -np.inf)
    same_bits((out[2:], lse[2:]), run(case, instruction_set=instruction_set))


def test_keys_past_the_table_are_not_seen(instruction_set):
    """A table of 5 blocks of 8 ends within a tile of 64 keys."""
    case = random_paged_case(Workload(rows=((1, 40),)))
    case = dataclasses.replace(case, block_tables=case.block_tables[:, :5])
    longer = dataclasses.replace(case, kv_lens=np.array([60], np.int32))
    results = run(longer, instruction_set=instruction_set)
    same_bits(results, run(case, instruction_set=instruction_set))


def test_an_empty_pool_is_refused(instruction_set):
    case = random_paged_case(Workload(rows=((2, 9),)))
    empty = case.cache.layers[0].k[:0]
    rows = (case.block_tables, case.kv_lens, case.cu_q_lens)
    with pytest.raises(jax.errors.JaxRuntimeError, match="an empty pool"):
        attend(case.q, empty, empty, *rows, instruction_set=instruction_set)


def test_no_rows_and_no_tokens(instruction_set):
    case = random_paged_case(Workload(rows=((1, 5),)))
    k, v = case.cache.layers[0]
    options = {"instruction_set": instruction_set}
    no_rows = (np.zeros((0, 2)), [], [0])
    out, lse = attend(case.q, k, v, *no_rows, **options)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(lse, -np.inf)
    out, lse = attend(case.q[:0], k, v, case.block_tables, [5], [0, 0], **options)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_large_scores_do_not_overflow(instruction_set):
    """Of some thousands, which a float32 holds to about 2**-11."""
    case = random_paged_case(Workload(rows=((4, 100),), head_dim=64))
    out, lse = run(case, instruction_set=instruction_set, scale=200.0)
    expected_out, expected_lse = dense_attention(case, scale=200.0)
    assert expected_lse.min() > 1000
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    np.testing.assert_allclose(out, expected_out, atol=1e-2)


def test_weights_are_within_a_few_units_in_the_last_place(instruction_set):
    """Each query weighs a key of score 0 and value 0 with one of `score` and 1."""
    score = np.append(np.linspace(-87, 0, 3000, dtype=np.float32), [-88, -1000])
    q = np.zeros((len(score), 1, 8), np.float32)
    q[:, 0, 0] = score
    k = np.zeros((2, 1, 2, 8), np.float32)
    k[1, 0, 1, 0] = 1
    out, lse = attend(
        q,
        k,
        k,
        np.ones((len(score), 1)),
        np.full(len(score), 2),
        np.arange(len(score) + 1),
        scale=1.0,
        instruction_set=instruction_set,
    )
    weight = np.where(score < -87.3, 0, np.exp(score.astype(np.float64)))
    # 2 units of the exponential, one of the sum and one of the quotient.
    expected = weight / (1 + weight)
    np.testing.assert_allclose(out[:, 0, 0], expected, rtol=4 * 2.0**-23)
    np.testing.assert_allclose(lse[:, 0], np.log1p(weight), atol=4 * 2.0**-23)


def test_vmap_attends_for_each(instruction_set):
    case = random_paged_case(Workload(rows=((3, 20), (1, 9))))
    q = jnp.stack([case.q, -case.q, case.q[::-1]])
    k, v = case.cache.layers[0]
    call = functools.partial(
        cpu_kernels.paged_attention,
        scale=0.3,
        return_lse=True,
        instruction_set=instruction_set,
    )
    arrays = tuple(case.arguments().values())
    together = jax.jit(jax.vmap(lambda q: call(q, k, v, *arrays)))(q)
    for i in range(3):
        same_bits([np.asarray(a[i]) for a in together], call(q[i], k, v, *arrays))


def test_without_return_lse_there_are_outputs_only():
    case = random_paged_case(Workload(rows=((3, 20),)))
    k, v = case.cache.layers[0]
    arrays = tuple(case.arguments().values())
    out = cpu_kernels.paged_attention(jnp.asarray(case.q), k, v, *arrays, scale=0.25)
    np.testing.assert_array_equal(out, run(case, scale=0.25)[0])


def test_other_dtypes_are_refused():
    case = random_paged_case(Workload(rows=((3, 20),)))
    k, v = case.cache.layers[0]
    arrays, q = tuple(case.arguments().values()), jnp.asarray(case.q)
    half = [a.astype("float16") for a in (q, k, v)]
    for changed in ((half[0], k, v), (q, half[1], half[2])):
        with pytest.raises(NotImplementedError, match="attention over float16"):
            cpu_kernels.paged_attention(*changed, *arrays, scale=1.0)
    with pytest.raises(NotImplementedError, match="keys and values of different"):
        cpu_kernels.paged_attention(q, k, v.astype("bfloat16"), *arrays, scale=1.0)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "float32:int4"])
def test_auto_gives_low_bit_caches_to_xla(kv_cache_dtype, caplog):
    workload = Workload(rows=((1, 20), (3, 9)), head_dim=64)
    case = low_bit_paged_case(workload, kv_cache_dtype)
    check_fallback(case, "a low-bit cache", caplog)


def test_auto_gives_float16_to_xla(caplog):
    case = random_paged_case(Workload(rows=((1, 20), (3, 9))), dtype="float16")
    check_fallback(case, "attention over float16", caplog)


def check_fallback(case, reason, caplog):
    def attend_by(implementation):
        return jax.jit(
            lambda q, cache, arrays: paged_attention(
                q, cache, 0, implementation=implementation, **arrays
            )
        )

    attention_module._log_once.cache_clear()
    arguments = (jnp.asarray(case.q), case.cache, case.arguments())
    with pytest.raises(NotImplementedError, match=reason):
        attend_by("cpu")(*arguments)
    attend_by("auto").lower(*arguments)  # logs, and the next one does not
    out = attend_by("auto")(*arguments)
    np.testing.assert_array_equal(out, attend_by("xla")(*arguments))
    largest = max(np.abs(v).max() for v in case.values)
    np.testing.assert_allclose(
        out, dense_attention(case)[0], atol=largest * TOLERANCE["float32"], rtol=0
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"paged_attention: cpu cannot do this: {reason}"
    ]


def test_auto_takes_the_kernel_on_a_cpu(caplog):
    case = random_paged_case(Workload(rows=((1, 20), (3, 9))))
    q, arguments = jnp.asarray(case.q), case.arguments()
    out = paged_attention(q, case.cache, 0, **arguments)
    np.testing.assert_array_equal(out, run(case)[0])
    assert not caplog.records


def test_threads_may_call_at_once():
    """One thread's scratch and tasks are nothing to another's."""
    cases = [
        random_paged_case(Workload(rows=((40, 90), (1, 60), (1, n))), seed=n)
        for n in (5, 30, 64, 100)
    ]
    call = jax.jit(functools.partial(cpu_kernels.paged_attention, scale=0.25))
    arrays = [
        (jnp.asarray(case.q), *case.cache.layers[0], *case.arguments().values())
        for case in cases
    ]
    expected = [np.asarray(call(*a)) for a in arrays]
    for case, out in zip(cases, expected, strict=True):
        wanted, _ = dense_attention(case)
        np.testing.assert_allclose(out, wanted, atol=TOLERANCE["float32"], rtol=0)
    failures = []

    def work(i):
        for _ in range(20):
            if not np.array_equal(call(*arrays[i]), expected[i]):
                failures.append(i)

    threads = [
        threading.Thread(target=work, args=(i,), daemon=True)
        for i, _ in itertools.product(range(4), range(2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
