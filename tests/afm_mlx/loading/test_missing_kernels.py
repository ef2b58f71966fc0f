"""Which models are reported to run without kernels, and why."""

import warnings

import pytest

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.loading.missing_kernels import SlowWarning, missing_kernels, warn_if_slow
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.engines import tiny
from tests.tools.zoo import zoo_model

pytestmark = pytest.mark.skipif(dispatch.device() == "gpu", reason="takes the CPU's kernels away")
WHY = "the C++ extension isn't there: nobody built it; build it"


def models(rng):
    """Models by what they are, and whether this package has kernels for them."""
    packed_zoo = zoo_model("llama", 64, 1)
    quantize_model(packed_zoo, {}, QuantizationRule(4), QuantizationRule(4))
    packed_experts = zoo_model("gpt_oss", 64, 1)
    quantize_model(packed_experts, {}, predicate=lambda path, _: "experts" in path)
    return [
        (tiny(rng, "2-bit", 8), True),
        (tiny(rng, "float", 8), True),
        (tiny(rng, "float"), True),
        (packed_zoo, True),
        (packed_experts, True),
        (zoo_model("llama", 64, 1), False),
        (None, True),
    ]


def test_models_that_have_kernels_are_reported_with_the_reason(no_extension, rng):
    for model, has_kernels in models(rng):
        assert missing_kernels(model) == (WHY if has_kernels else ""), model
        if model is not None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warn_if_slow(model)
            assert [str(w.message)[-len(WHY) - 1 : -1] for w in caught] == [WHY] * has_kernels
            assert all(w.category is SlowWarning for w in caught)


@pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
def test_nothing_is_said_where_kernels_run(rng):
    assert not any(missing_kernels(model) for model, _ in models(rng))
    with dispatch.force("cpu"):
        assert not missing_kernels()


@pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
def test_kernels_that_somebody_asked_for_and_those_that_failed(rng):
    model = tiny(rng, "2-bit", 8)
    with dispatch.force("reference"):
        assert missing_kernels(model) == "AFM_MLX_KERNELS asks for reference; unset it"
    dispatch.disable("cpu/packed_matmul", "failed the self-test (off by 3)")
    dispatch.disable("cpu/packed_embedding", "failed the self-test (off by 4)")
    try:
        assert missing_kernels(model) == (
            "packed_matmul: failed the self-test (off by 3); "
            "packed_embedding: failed the self-test (off by 4)"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_slow(model)  # the self-test has reported these
    finally:
        dispatch.enable("cpu/packed_matmul")
        dispatch.enable("cpu/packed_embedding")
