"""Arrays that files hold."""

import mlx.core as mx

TYPES = [getattr(mx, t) for t in "bfloat16 float16 float32 uint32 int8 uint8 int64 bool_".split()]


def random_arrays(rng):
    """One array of each type and of odd shapes, with a scalar and an empty one."""
    shapes = [(3, 5), (7,), (2, 3, 4), (1,), (), (0, 4), (9, 2), (5,)]
    return {
        f"layer.{i}": mx.array(rng.integers(0, 100, shape)).astype(dtype)
        for i, (dtype, shape) in enumerate(zip(TYPES, shapes, strict=True))
    }
