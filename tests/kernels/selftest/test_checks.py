"""The self-test finds what is wrong, leaves alone what is right, and remembers both."""

import itertools
import os
import subprocess
import sys
import time
import warnings

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import dispatch, reference
from afm_mlx.kernels.dispatch import Variant
from afm_mlx.kernels.formats import PackedWeight
from afm_mlx.kernels.selftest import checks, oracle, specs, verdict
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from afm_mlx.kernels.selftest.verdict import ENDED, Verdict
from tests.tools.compare import assert_close

MATRIX = {"in_dims": 512, "out_dims": 96, "bits": 2, "mode": "balanced", "granularity": "row"}
HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine without a verdict, where the reference alone runs."""
    monkeypatch.setenv(verdict.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(checks.SWITCH, raising=False)
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    monkeypatch.setattr(dispatch, "_disabled", {})
    offer(monkeypatch)
    yield tmp_path / "cache"
    monkeypatch.undo()
    dispatch.select.cache_clear()
    checks.ensure_checked.cache_clear()


def offer(monkeypatch, op="", run=None, name="cpu/fake"):
    """Put one variant before the reference of one operation."""

    def listed(asked):
        first = [Variant(op, name, run, lambda case: None)] if asked == op else []
        own = Variant(asked, "reference", getattr(reference, asked), lambda case: None)
        return (*first, own)

    monkeypatch.setattr(dispatch, "variants", listed)
    dispatch.select.cache_clear()
    checks.ensure_checked.cache_clear()


# -- the oracle


def test_oracle_matrix_is_the_formula_spelled_out(rng):
    for spec in [s for s in specs.full_specs() if s.op == "packed_embedding"]:
        weight = make(spec._replace(out_dims=12), rng).args[1]
        dense = oracle.matrix(weight)
        scales, biases, table = (
            None if part is None else oracle.float64(part) for part in weight[3:]
        )
        for _ in range(20):
            n, k = int(rng.integers(12)), int(rng.integers(spec.in_dims))
            word = int(np.array(weight.codes)[n, k * spec.bits // 32])
            code = word >> (k * spec.bits % 32) & (2**spec.bits - 1)
            at = {0: (), 1: (n,), 2: (n, k // max(1, spec.group_size))}
            if spec.mode == "palette":
                value = table[n * len(table) // 12, code]
            elif spec.mode == "balanced":
                value = scales[at[scales.ndim]] * (code - (2**spec.bits - 1) / 2)
            else:
                value = scales[at[scales.ndim]] * code + biases[at[scales.ndim]]
            assert dense[n, k] == value


def test_oracle_adapters_equal_a_merged_matrix(rng):
    problem = make(Spec("packed_matmul", batch=4, tokens=2, **MATRIX, rank=8, sections=3), rng)
    x, weight, options = problem.args
    (low_rank,) = options.adapters
    start = np.array([0, *low_rank.sections])
    for row, slot in enumerate(low_rank.slots.tolist()):
        merged = oracle.matrix(weight)
        if slot >= 0 and (rank := low_rank.parts[slot].rank):
            factors = reference.low_rank_factors(low_rank, slot, weight.in_dims)
            a, b = map(oracle.float64, factors)
            for i in range(3):
                rows = slice(start[i], start[i + 1])
                added = b[rows] @ a[rank * i : rank * i + rank]
                merged[rows] += float(low_rank.scales[slot]) * added
        assert_close(problem.wanted[0][row], oracle.float64(x[row]) @ merged.T, 1e-12, row, least=1)


def test_the_full_test_covers_every_pair():
    listed = specs.full_specs()
    assert {spec.op for spec in listed} == set(dispatch.OPS)
    products = [spec for spec in listed if spec.op == "packed_matmul"]
    values = {
        "dtype": DTYPES,
        "bits": (2, 4, 8),
        "mode": ("balanced", "affine", "palette"),
        "out_dims": (256, 37),
        "rows": (1, 3, 8, 40),
        "norm": (True, False),
        "residual": (True, False),
        "rank": (0, 8, 16),
        "activation_bits": (16, 8),
    }
    for one, two in itertools.combinations(values, 2):
        seen = {tuple(_value(spec, name) for name in (one, two)) for spec in products}
        assert seen == set(itertools.product(values[one], values[two]))


def _value(spec, name):
    return spec.batch * spec.tokens if name == "rows" else getattr(spec, name)


def test_specs_of_the_model_are_whole(rng):
    """Each one packs, and has a name of its own."""
    for listed in (specs.model_specs(mx.bfloat16), specs.quick_specs(mx.float16)):
        assert len({(s.op, s.label) for s in listed}) == len(listed)
        for spec in listed:
            assert spec.in_dims * spec.bits % 32 == 0
            make(spec._replace(out_dims=min(spec.out_dims, 64), tokens=min(spec.tokens, 3)), rng)


# -- faults


def without_last_word(x, weight, options):
    inputs = x.shape[-1] - 32 // weight.bits
    return reference.packed_matmul(x * (mx.arange(x.shape[-1]) < inputs), weight, options)


def with_neighbours_scale(x, weight, options):
    shifted = mx.concatenate([weight.scales[1:], weight.scales[:1]])
    return reference.packed_matmul(x, weight._replace(scales=shifted), options)


def without_last_row(x, weight, options):
    y = reference.packed_matmul(x, weight, options)
    return y * (mx.arange(y.shape[-1]) < y.shape[-1] - 1)


def without_norm(x, weight, options):
    return reference.packed_matmul(x, weight, options._replace(norm=None))


def without_residual(x, weight, options):
    return reference.packed_matmul(x, weight, options._replace(residual=None))


def with_the_first_adapter(x, weight, options):
    (low_rank,) = options.adapters
    first = low_rank._replace(slots=low_rank.slots * 0)
    return reference.packed_matmul(x, weight, options._replace(adapters=(first,)))


def with_one_section(x, weight, options):
    (low_rank,) = options.adapters
    whole = low_rank._replace(sections=(weight.out_dims,))
    return reference.packed_matmul(x, weight, options._replace(adapters=(whole,)))


def summed_in_bfloat16(x, weight, options):
    return reference.packed_matmul(x.astype(mx.bfloat16), weight, options).astype(x.dtype)


@pytest.mark.parametrize(
    "fault",
    [
        without_last_word,
        with_neighbours_scale,
        without_last_row,
        without_norm,
        without_residual,
        with_the_first_adapter,
        with_one_section,
    ],
)
def test_faulty_products_are_found(rng, monkeypatch, fault):
    given = {**MATRIX, "norm": True, "residual": True, "rank": 8, "sections": 2}
    for dtype in DTYPES:
        dispatch.enable("cpu/fake")
        offer(monkeypatch, "packed_matmul", fault)
        (result, behind) = checks.check([Spec("packed_matmul", dtype, 3, **given)], rng)
        assert "is over its bound" in result.failure
        assert (result.variant, result.chosen) == ("cpu/fake", False)
        assert (behind.variant, behind.chosen, behind.failure) == ("reference", True, None)
        assert result.summary in dispatch.disabled()["cpu/fake"]


def test_lost_precision_is_found(rng, monkeypatch):
    offer(monkeypatch, "packed_matmul", summed_in_bfloat16)
    spec = Spec("packed_matmul", mx.float32, **MATRIX)
    assert checks.check([spec], rng)[0].failure is not None
    # 8-bit activations are coarser than that, by choice.
    dispatch.enable("cpu/fake")
    assert checks.check([spec._replace(activation_bits=8)], rng)[0].failure is None


def up_and_gate(x, gate, up, options):
    return reference.packed_swiglu(x, up, gate, options)


def next_row(x, weight, options):
    index, value = reference.packed_argmax(x, weight, options)
    return (index + 1) % weight.out_dims, value


def next_token(tokens, weight, dtype):
    return reference.packed_embedding((tokens + 1) % weight.out_dims, weight, dtype)


def next_position(qkv, offset, options):
    return reference.rope_norm_quantize(qkv, offset + 1, options)


def rounded_down(qkv, offset, options):
    q, codes = reference.rope_norm_quantize(qkv, offset, options)
    k, v = codes.split(2, axis=1)
    head_dim = options.q_weight.shape[0]
    raw = qkv.reshape(*qkv.shape[:2], -1, head_dim).swapaxes(1, 2)[:, -v.shape[1] :]
    v = mx.clip(mx.floor(raw.astype(mx.float32) / options.value_scale), -128, 127).astype(mx.int8)
    return q, mx.concatenate([k, v], axis=1)


def past_the_end(queries, kv, lengths, rope=None):
    return reference.decode_attention(queries, kv, lengths + 1, rope)


def other_heads(queries, kv, lengths, rope=None):
    swapped = kv._replace(buffer=mx.concatenate([kv.keys[:, ::-1], kv.values], axis=1))
    return reference.decode_attention(queries, swapped, lengths, rope)


def raw_queries(queries, kv, lengths, rope=None):
    return reference.decode_attention(queries, kv, lengths)


@pytest.mark.parametrize(
    ("op", "fault", "shape"),
    [
        ("packed_swiglu", up_and_gate, MATRIX),
        ("packed_argmax", next_row, MATRIX),
        ("packed_embedding", next_token, MATRIX),
        ("rope_norm_quantize", next_position, HEADS),
        ("rope_norm_quantize", rounded_down, HEADS),
        ("decode_attention", past_the_end, {**HEADS, "capacity": 33}),
        ("decode_attention", other_heads, {**HEADS, "capacity": 33}),
        ("decode_attention", raw_queries, {**HEADS, "capacity": 300, "rope": True}),
    ],
)
def test_other_faults_are_found(rng, monkeypatch, op, fault, shape):
    for dtype in DTYPES:
        dispatch.enable("cpu/fake")
        offer(monkeypatch, op, fault)
        result = checks.check([Spec(op, dtype, 2, **shape)], rng)[0]
        assert result.variant == "cpu/fake"
        assert result.failure is not None, dtype


def raises(*args):
    raise RuntimeError("program_source:12: error:\n no such thing")


def test_a_variant_that_does_not_answer_is_found(rng, monkeypatch):
    for fault, words in (
        (raises, "RuntimeError: program_source:12: error: no such thing"),
        (lambda *args: mx.zeros((1, 1, 96), mx.float16), "returned mlx.core.float16"),
        (lambda *args: mx.zeros((1, 96)), r"returned mlx.core.float32 (1, 96)"),
        (lambda *args: mx.full((1, 1, 96), np.nan), "error inf"),
    ):
        dispatch.enable("cpu/fake")
        offer(monkeypatch, "packed_matmul", fault)
        result = checks.check([Spec("packed_matmul", **MATRIX)], rng)[0]
        assert words in result.failure
        assert "cpu/fake" in dispatch.disabled()


def test_a_fault_in_the_reference_is_told_and_not_disabled(rng, monkeypatch):
    monkeypatch.setattr(reference, "packed_embedding", next_token)
    results = checks.check([Spec("packed_embedding", **MATRIX)], rng)
    assert list(checks.failures(results)) == ["reference"]
    assert "runs instead" not in checks.failures(results)["reference"]
    assert dispatch.disabled() == {}


def test_a_fault_in_the_reference_is_told_at_every_start(monkeypatch):
    monkeypatch.setattr(reference, "packed_embedding", next_token)
    offer(monkeypatch)
    for _ in range(2):
        check_with_warning(
            "^Plain MLX gives wrong results on this machine .packed_embedding, 4 rows"
        )
        assert dispatch.disabled() == {}


def test_variants_with_an_obstacle_are_not_run(rng, monkeypatch):
    offer(monkeypatch, "packed_matmul", raises, name="metal/fake")
    results = checks.check([Spec("packed_matmul", **MATRIX)], rng)
    assert [r.obstacle for r in results] == ["runs on metal only", None]
    with dispatch.force("metal"):
        results = checks.check([Spec("packed_matmul", **MATRIX)], rng)
        assert results[0].failure is not None


def test_what_runs_is_tested_and_what_stands_behind_a_fault(rng, monkeypatch):
    spec = Spec("packed_matmul", **MATRIX)
    for run, names in (
        (reference.packed_matmul, ["cpu/fake"]),
        (raises, ["cpu/fake", "reference"]),
    ):
        offer(monkeypatch, "packed_matmul", run)
        results = checks.check([spec], rng, only_what_runs=True)
        assert [r.variant for r in results] == names
        assert [r.chosen for r in results] == [name == names[-1] for name in names]


# -- time


def test_time_per_call_is_that_of_the_chain_without_its_links(rng, monkeypatch):
    problem = make(Spec("packed_matmul", **MATRIX), rng)
    seen = []

    def chain(run, problem, args, length):
        seen.append((run is not None, length))
        return length * (5e-3 if run else 1e-3)

    monkeypatch.setattr(checks, "_chain_seconds", chain)
    assert checks.seconds_per_call(reference.packed_matmul, problem) == pytest.approx(4e-3)
    assert (True, 4) in seen
    assert (False, 4) in seen


def test_every_operation_can_be_timed(rng):
    for op in dispatch.OPS:
        spec = next(s for s in specs.quick_specs(mx.float32) if s.op == op)
        (result,) = checks.check([spec], rng, timed=True)
        assert result.failure is None, op
        assert result.seconds > 0
        assert result.bytes_per_second == result.nbytes / result.seconds


def test_calls_in_turn_read_other_bytes_of_the_same_size(rng):
    for spec in specs.quick_specs(mx.float32):
        problem = make(spec, rng)
        for args in problem.fresh(3)[1:]:
            for new, old in zip(args, problem.args, strict=True):
                if isinstance(new, PackedWeight):
                    assert new.nbytes == old.nbytes
                    assert not mx.any(new.codes == old.codes).item()


def test_bytes_of_a_call(rng):
    problem = make(Spec("packed_matmul", mx.bfloat16, **MATRIX, norm=True), rng)
    assert problem.nbytes == 96 * 512 // 4 + 96 * 4 + 2 * 512 + 2 * 512 + 2 * 96
    problem = make(Spec("packed_matmul", **MATRIX, rank=8), rng)  # one of three adapters is used
    (low_rank,) = problem.args[-1].adapters
    used = low_rank.numbers[low_rank.slots.item()].nbytes
    plain = 96 * 512 // 4 + 96 * 4 + 4 * (512 + 96)
    assert problem.nbytes == plain + used + low_rank.scales.nbytes + 4
    problem = make(Spec("decode_attention", **HEADS, capacity=100), rng)
    assert problem.nbytes == 2 * 4 * 8 * 64 + 97 * 2 * 2 * 64


# -- remembering


def check_silently():
    checks.ensure_checked.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.ensure_checked()


def check_with_warning(match):
    checks.ensure_checked.cache_clear()
    with pytest.warns(RuntimeWarning, match=match) as seen:
        checks.ensure_checked()
    assert len(seen) == 1
    assert "afm-mlx doctor" in str(seen[0].message)


def test_a_machine_is_checked_once(machine, monkeypatch):
    runs = []

    def counted(*args):
        runs.append(1)
        return reference.packed_matmul(*args)

    offer(monkeypatch, "packed_matmul", counted)
    check_silently()
    assert runs
    first = len(runs)
    check_silently()
    assert len(runs) == first
    # Other kernels are another matter.
    monkeypatch.setattr(verdict, "_sources_digest", lambda: "other")
    check_silently()
    assert len(runs) > first
    assert len(list(machine.iterdir())) == 2


def test_a_failure_is_told_at_every_start(monkeypatch):
    runs = []

    def faulty(*args):
        runs.append(1)
        return without_last_word(*args)

    offer(monkeypatch, "packed_matmul", faulty)
    words = r"cpu/fake failed its self-test .* over its bound, .*; reference runs instead"
    check_with_warning(words)
    ran = len(runs)
    assert "cpu/fake" in dispatch.disabled()
    dispatch.enable("cpu/fake")
    check_with_warning(words)
    assert "cpu/fake" in dispatch.disabled()
    assert len(runs) == ran


def test_a_variant_that_ends_the_process_is_left_alone_the_next_time():
    code = """
import os
from afm_mlx.kernels import dispatch, reference
from afm_mlx.kernels.selftest import checks
from afm_mlx.kernels.dispatch import Variant
end = Variant("packed_matmul", "cpu/fake", lambda *args: os._exit(9), lambda case: None)
dispatch.variants = lambda op: (
    *([end] if op == "packed_matmul" else []),
    Variant(op, "reference", getattr(reference, op), lambda case: None),
)
checks.ensure_checked()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment).returncode == 9
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert (
        f"cpu/fake failed its self-test on this machine and is switched off ({ENDED})"
        in done.stderr
    )


def test_another_process_that_is_testing_now_is_no_failure():
    Verdict().begin("cpu/fake")
    known = Verdict()
    assert (known.done, known.failures) == (False, {})


def test_a_process_id_that_is_another_processs_now_is_no_test(machine):
    """The test of a variant takes moments; a machine that it stopped starts anew, and so do its ids."""
    Verdict().begin("cpu/fake")
    (path,) = machine.iterdir()
    leftover, new = path.with_name("selftest-0-x.tmp"), path.with_name("selftest-0-y.tmp")
    leftover.touch()
    for file in (path, leftover):
        os.utime(file, times=(time.time() - 2 * verdict.TESTING_SECONDS,) * 2)
    new.touch()
    known = Verdict()
    assert known.failures == {"cpu/fake": ENDED}
    known.end(known.failures)
    assert sorted(path.parent.iterdir()) == sorted([path, new])


def test_an_interrupted_test_is_no_verdict(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    offer(monkeypatch, "packed_matmul", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checks.ensure_checked()
    known = Verdict()
    assert (known.done, known.failures) == (False, {})


def test_a_damaged_verdict_is_none(machine):
    check_silently()
    (path,) = machine.iterdir()
    for text in ("", "{", "[]", '{"failures": 3, "running": null, "pid": 1}'):
        path.write_text(text)
        assert not Verdict().done, text
    check_silently()
    assert Verdict().done


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(machine):
    machine.write_text("a file where the folder should be")
    check_silently()
    known = Verdict()
    known.forget()
    assert not known.done


def test_what_is_asked_for_is_not_tested(machine, monkeypatch):
    offer(monkeypatch, "packed_matmul", raises)
    monkeypatch.setenv(checks.SWITCH, "0")
    check_silently()
    monkeypatch.delenv(checks.SWITCH)
    monkeypatch.setenv(dispatch.SWITCH, "reference")
    check_silently()
    assert not machine.exists()


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(verdict.FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert verdict.cache_folder() == tmp_path / "Library" / "Caches" / "afm-mlx"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert verdict.cache_folder() == tmp_path / ".cache" / "afm-mlx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert verdict.cache_folder() == tmp_path / "x" / "afm-mlx"
