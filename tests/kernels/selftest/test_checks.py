"""The self-test finds faulty variants, passes correct ones, and stores its verdict."""

import os
import sys
import time
import warnings

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import dispatch, reference, settings
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.dispatch import Variant
from afm_mlx.kernels.selftest import checks, specs
from afm_mlx.kernels.selftest.checks import ENDED, Verdict
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.metal import toolchain
from tests.metal.emulator import emulated
from tests.tools.cases import each
from tests.tools.cli import process

MATRIX = {"in_dims": 512, "out_dims": 96, "bits": 2, "mode": "balanced", "granularity": "row"}
PRODUCT = Spec("packed_matmul", **MATRIX)
HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of verdicts, which isn't there yet, nor the one that it is in."""
    folder = tmp_path / "caches" / "afm-mlx"
    monkeypatch.setenv(settings.CACHE, str(folder))
    monkeypatch.delenv(checks.SWITCH, raising=False)
    checks.ensure_checked.cache_clear()
    yield folder
    checks.ensure_checked.cache_clear()


@pytest.fixture
def offer(monkeypatch):
    """Put one variant before the reference of one operation; nothing else can run."""

    def put(op="", run=None, name="cpu/fake"):
        def listed(asked):
            first = [Variant(op, name, run, lambda case: None)] if asked == op else []
            own = Variant(asked, "reference", getattr(reference, asked), lambda case: None)
            return (*first, own)

        monkeypatch.setattr(dispatch, "variants", listed)
        dispatch.enable(name)
        checks.ensure_checked.cache_clear()

    put()
    return put


# -- the kernels that there are


def test_every_variant_of_this_machine_passes(rng):
    results = checks.check(specs.full_specs(), rng)
    assert [f"{r.variant}: {r.summary}" for r in results if r.failure is not None] == []
    tested = {r.spec.op for r in results if r.obstacle is None and r.variant != "reference"}
    if dispatch.device() == "cpu" and extension.status().available:
        assert tested == set(dispatch.OPS)


def test_the_quick_test_passes_in_the_emulator(rng):
    if reason := toolchain.why_unavailable():
        pytest.skip(reason)
    with dispatch.force("metal"), emulated():
        # Not in bfloat16: MLX's own kernels run on the CPU here, where they add up in bfloat16.
        results = checks.check(specs.quick_specs(mx.float32), rng)
    assert [f"{r.variant}: {r.summary}" for r in results if r.failure is not None] == []
    tested = {(r.spec.op, r.variant.split("/")[0]) for r in results if r.obstacle is None}
    ours = set(dispatch.OPS) - {
        "write_tokens",
        "norm_rope",
        "norm_rope_attend",
        "gelu",
    }  # MLX's own
    assert {op for op, backend in tested if backend == "metal"} == ours
    passed = {r.variant for r in results if r.obstacle is None}
    assert passed >= {v.name for op in ours for v in dispatch.variants(op) if v.backend == "metal"}


# -- faults


def without_last_word(x, weight, options):
    inputs = x.shape[-1] - 32 // weight.bits
    return reference.packed_matmul(x * (mx.arange(x.shape[-1]) < inputs), weight, options)


def next_token(tokens, weight, dtype):
    return reference.packed_embedding((tokens + 1) % weight.out_dims, weight, dtype)


def next_row(x, weight, options):
    index, value = reference.packed_argmax(x, weight, options)
    return (index + 1) % weight.out_dims, value


def rounded_down(qkv, offset, options):
    q, codes = reference.rope_norm_quantize(qkv, offset, options)
    k, v = codes.split(2, axis=1)
    raw = qkv.reshape(*qkv.shape[:2], -1, k.shape[-1]).swapaxes(1, 2)[:, -v.shape[1] :]
    v = mx.clip(mx.floor(raw.astype(mx.float32) / options.value_scale), -128, 127).astype(mx.int8)
    return q, mx.concatenate([k, v], axis=1)


def adapted(x, weight, options, **fields):
    """A product whose adapters have other fields."""
    adapters = (options.adapters[0]._replace(**fields),)
    return reference.packed_matmul(x, weight, options._replace(adapters=adapters))


product, attend = reference.packed_matmul, reference.decode_attention
SHAPES = {
    "packed_matmul": {**MATRIX, "norm": True, "residual": True, "rank": 8, "sections": 2},
    **dict.fromkeys(("packed_swiglu", "packed_argmax", "packed_embedding"), MATRIX),
    "rope_norm_quantize": HEADS,
    "norm_rope": {**HEADS, "norm": True, "stored": mx.float32},
    "norm_rope_attend": {
        **HEADS,
        **{"norm": True, "capacity": 300, "tail": 64, "stored": mx.float32},
    },
    "decode_attention": {**HEADS, "capacity": 300, "rope": True},
    "causal_attention": {**HEADS, "tokens": 5, "capacity": 9},
    "write_tokens": {**HEADS, "tokens": 2, "capacity": 9},
    "gelu": {"tokens": 5, "in_dims": 64},
}
FAULTS = {
    "packed_matmul without the last word": without_last_word,
    "packed_matmul with the neighbour's scale": (
        lambda x, w, options: product(x, w._replace(scales=mx.roll(w.scales, 1)), options)
    ),
    "packed_matmul without norm": lambda x, w, options: product(x, w, options._replace(norm=None)),
    "packed_matmul with the first adapter": (
        lambda x, w, options: adapted(x, w, options, slots=options.adapters[0].slots * 0)
    ),
    "packed_matmul with one section": lambda x, w, o: adapted(x, w, o, sections=(w.out_dims,)),
    "packed_swiglu of up and gate": lambda x, g, u, o: reference.packed_swiglu(x, u, g, o),
    "packed_argmax of the next row": next_row,
    "packed_embedding of the next token": next_token,
    "rope_norm_quantize one position on": (
        lambda qkv, offset, options: reference.rope_norm_quantize(qkv, offset + 1, options)
    ),
    "rope_norm_quantize rounding down": rounded_down,
    "norm_rope without norm": lambda x, periods, offset, *_: reference.norm_rope(
        x, periods, offset
    ),
    "norm_rope of neighbours": (
        lambda x, periods, offset, weight, eps: mx.fast.rope(
            mx.fast.rms_norm(x, weight, eps),
            x.shape[-1],
            traditional=True,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )
    ),
    "norm_rope_attend one position on": (
        lambda token, kv, lengths: reference.norm_rope_attend(
            token, kv._replace(starts=kv.starts + 1), lengths + 1
        )
    ),
    "norm_rope_attend with the norms exchanged": (
        lambda token, kv, lengths: reference.norm_rope_attend(
            token._replace(norms=token.norms[::-1]), kv, lengths
        )
    ),
    "decode_attention past the end": lambda q, kv, lengths, rope: attend(q, kv, lengths + 1, rope),
    "decode_attention of raw queries": lambda q, kv, lengths, rope: attend(q, kv, lengths),
    "causal_attention without a mask": lambda q, kv: reference.attention(q, kv, None),
    "gelu with a logistic curve": lambda x: x * mx.sigmoid(x),
    "write_tokens one column early": lambda b, t, n: reference.write_tokens(b, t, n - 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(rng, offer, name):
    op = name.partition(" ")[0]
    for dtype in [mx.int8] if op == "write_tokens" else DTYPES:
        offer(op, FAULTS[name])
        found, behind = checks.check([Spec(op, dtype, 3, **SHAPES[op])], rng)
        assert (found.variant, found.chosen) == ("cpu/fake", False)
        assert found.failure is not None, dtype
        assert (behind.variant, behind.chosen, behind.failure) == ("reference", True, None)
        assert found.summary in dispatch.disabled()["cpu/fake"]


def test_lost_precision_is_found(rng, offer):
    def summed_in_bfloat16(x, weight, options):
        return reference.packed_matmul(x.astype(mx.bfloat16), weight, options).astype(x.dtype)

    offer("packed_matmul", summed_in_bfloat16)
    assert checks.check([PRODUCT], rng)[0].failure is not None
    # 8-bit activations are coarser than that, by choice.
    dispatch.enable("cpu/fake")
    assert checks.check([PRODUCT._replace(activation_bits=8)], rng)[0].failure is None


def raises(*args):
    raise RuntimeError("program_source:12: error:\n no such thing")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (raises, "RuntimeError: program_source:12: error: no such thing"),
        (lambda *args: mx.zeros((1, 1, 96), mx.float16), "returned mlx.core.float16"),
        (lambda *args: mx.zeros((1, 96)), "returned mlx.core.float32 (1, 96)"),
        (lambda *args: mx.full((1, 1, 96), np.nan), "error inf is over its bound"),
    ],
)
def test_a_variant_that_does_not_answer_is_found(rng, offer, run, words):
    offer("packed_matmul", run)
    assert words in checks.check([PRODUCT], rng)[0].failure
    assert "cpu/fake" in dispatch.disabled()


def test_variants_with_an_obstacle_are_not_run(rng, offer):
    offer("packed_matmul", raises, name="metal/fake")
    results = checks.check([PRODUCT], rng)
    assert [r.obstacle for r in results] == ["runs on metal only", None]
    with dispatch.force("metal"):
        assert checks.check([PRODUCT], rng)[0].failure is not None


@pytest.mark.parametrize(
    ("run", "names"), [(reference.packed_matmul, ["cpu/fake"]), (raises, ["cpu/fake", "reference"])]
)
def test_what_runs_is_tested_and_what_stands_behind_a_fault(rng, offer, run, names):
    offer("packed_matmul", run)
    results = checks.check([PRODUCT], rng, only_what_runs=True)
    assert [r.variant for r in results] == names
    assert [r.chosen for r in results] == [name == names[-1] for name in names]


def test_the_reference_is_left_out_where_the_matrix_would_not_fit(rng, offer, monkeypatch):
    monkeypatch.setattr(checks, "_LARGEST_OF_REFERENCE", 96 * 512 - 1)
    lookup = PRODUCT._replace(op="packed_embedding")
    product, looked_up = checks.check([PRODUCT, lookup], rng)
    assert product.obstacle == "not tested on a matrix of this size"
    assert looked_up.obstacle is None


# -- time


def test_every_operation_can_be_timed(rng, offer):
    for op in dispatch.OPS:
        spec = next(s for s in specs.quick_specs(mx.float32) if s.op == op)
        (result,) = checks.check([spec], rng, timed=True)
        assert result.failure is None, op
        assert result.seconds > 0
        assert result.bytes_per_second == result.nbytes / result.seconds


# -- once on a machine


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


def counted(run):
    def count(*args):
        count.calls += 1
        return run(*args)

    count.calls = 0
    return count


def test_a_machine_is_checked_once(cache, offer, monkeypatch):
    run = counted(reference.packed_matmul)
    offer("packed_matmul", run)
    check_silently()
    first = run.calls
    assert first > 0
    check_silently()
    assert run.calls == first
    # Other kernels are another matter.
    monkeypatch.setattr(checks, "_sources_digest", lambda: "other")
    check_silently()
    assert run.calls > first
    assert len(list(cache.iterdir())) == 2


def test_a_failure_is_reported_at_every_start(cache, offer):
    run = counted(without_last_word)
    offer("packed_matmul", run)
    calls = set()
    for _ in range(2):
        check_with_warning(
            r"cpu/fake failed its self-test .* over its bound, .*; reference runs instead"
        )
        assert "cpu/fake" in dispatch.disabled()
        dispatch.enable("cpu/fake")
        calls.add(run.calls)
    assert len(calls) == 1


def test_a_fault_in_the_reference_is_reported_at_every_start_and_not_disabled(
    cache, offer, monkeypatch
):
    monkeypatch.setattr(reference, "packed_embedding", next_token)
    offer()
    for _ in range(2):
        check_with_warning(
            "^Plain MLX gives wrong results on this machine .packed_embedding, 4 rows(?!.*instead)"
        )
        assert dispatch.disabled() == {}


def test_a_variant_that_ends_the_process_is_left_alone_the_next_time(cache):
    code = """
import os
import afm_mlx
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
    assert process(code=code).returncode == 9
    done = process(code=code)
    assert done.returncode == 0
    words = f"cpu/fake failed its self-test on this machine and is switched off ({ENDED})"
    assert words in done.stderr


def test_an_interrupted_test_is_no_verdict(cache, offer):
    def interrupted(*args):
        raise KeyboardInterrupt

    offer("packed_matmul", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checks.ensure_checked()
    known = Verdict()
    assert (known.done, known.failures) == (False, {})


def test_what_is_asked_for_is_not_tested(cache, offer, monkeypatch):
    offer("packed_matmul", raises)
    for switch, value in ((checks.SWITCH, "0"), (dispatch.SWITCH, "reference")):
        monkeypatch.setenv(switch, value)
        check_silently()
        monkeypatch.delenv(switch)
    assert not cache.exists()


# -- the verdict's file


def test_another_process_that_is_testing_now_is_no_failure(cache):
    Verdict().begin("cpu/fake")
    known = Verdict()
    assert (known.done, known.failures) == (False, {})


def test_a_process_id_that_is_another_processs_now_is_no_test(cache):
    """A variant's test takes moments; after a machine has stopped, process ids begin again."""
    Verdict().begin("cpu/fake")
    (path,) = cache.iterdir()
    leftover, new = path.with_name("selftest-0-x.tmp"), path.with_name("selftest-0-y.tmp")
    leftover.touch()
    for file in (path, leftover):
        os.utime(file, times=(time.time() - 2 * checks.TESTING_SECONDS,) * 2)
    new.touch()
    known = Verdict()
    assert known.failures == {"cpu/fake": ENDED}
    known.end(known.failures)
    assert sorted(cache.iterdir()) == sorted([path, new])


def test_what_ended_the_process_outlives_an_interrupt(cache):
    Verdict().end({"cpu/fake": ENDED, "cpu/other": "error 1 is over its bound, 0"})
    known = Verdict()
    assert (known.done, len(known.failures)) == (True, 2)
    known.forget(keep_ended=True)
    assert (known.done, known.failures) == (False, {"cpu/fake": ENDED})
    assert not Verdict().done


@each("text", ["", "{", "[]", '{"failures": 3, "running": null, "pid": 1}', "[" * 100_000])
def test_a_damaged_verdict_is_none(cache, text):
    Verdict().end({})
    (path,) = cache.iterdir()
    path.write_text(text)
    assert not Verdict().done


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(cache):
    cache.parent.write_text("a file where a folder should be")
    known = Verdict()
    known.begin("cpu/fake")
    known.end({})
    assert not Verdict().done
    known.forget()
    assert not known.done


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("darwin", {}, "Library/Caches/afm-mlx"),
        ("linux", {}, ".cache/afm-mlx"),
        ("linux", {"XDG_CACHE_HOME": "{home}/x"}, "x/afm-mlx"),
        ("linux", {settings.CACHE: "{home}/y"}, "y"),
    ],
)
def test_the_cache_folder(monkeypatch, tmp_path, platform, environment, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    for name in (settings.CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    assert settings.cache_folder() == tmp_path / folder
