"""The lists of problems: what they cover, and that each one can be drawn."""

import itertools

import mlx.core as mx

from afm_mlx.kernels import BITS, MODES, dispatch
from afm_mlx.kernels.selftest import specs
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES


def test_the_full_test_covers_every_pair():
    listed = specs.full_specs()
    assert {spec.op for spec in listed} == set(dispatch.OPS)
    values = {
        "dtype": DTYPES,
        "bits": BITS,
        "mode": MODES,
        "out_dims": (256, 37),
        "rows": (1, 3, 8, 40),
        "norm": (True, False),
        "residual": (True, False),
        "rank": (0, 8, 16),
        "activation_bits": (16, 8),
    }
    products = [
        {**spec._asdict(), "rows": spec.batch * spec.tokens}
        for spec in listed
        if spec.op == "packed_matmul" and not spec.outliers
    ]
    for one, two in itertools.combinations(values, 2):
        seen = {(product[one], product[two]) for product in products}
        assert seen == set(itertools.product(values[one], values[two]))


def test_specs_of_the_model_are_whole(rng):
    """Each one packs, and has a name of its own."""
    for listed in (specs.model_specs(mx.bfloat16), specs.quick_specs(mx.float16)):
        assert {spec.op for spec in listed} == set(dispatch.OPS)
        assert len({(s.op, s.label) for s in listed}) == len(listed)
        for spec in listed:
            assert spec.in_dims * spec.bits % 32 == 0
            make(spec._replace(out_dims=min(spec.out_dims, 64), tokens=min(spec.tokens, 3)), rng)


def test_a_label_names_what_the_problem_is_made_of():
    matrix = {"in_dims": 64, "out_dims": 8, "bits": 4, "mode": "affine"}
    product = specs.Spec(
        "packed_matmul",
        batch=2,
        tokens=3,
        **matrix,
        granularity="group",
        group_size=32,
        norm=True,
        rank=8,
        activation_bits=8,
    )
    assert product.label == (
        "6 rows, 8x64, 4-bit affine g32, norm, LoRA 8, 8-bit activations, float32"
    )
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 16, "capacity": 9}
    attention = specs.Spec("decode_attention", mx.float16, **heads, rope=True)
    assert attention.label == "1 row, 4/2 heads x 16, 9 columns, rope, float16"
