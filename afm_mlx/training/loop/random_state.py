"""The state of MLX's random generator as one number, which a checkpoint keeps."""

import mlx.core as mx


def random_key() -> int:
    """The seed that puts MLX's generator in the state that it is in."""
    high, low = mx.random.state[0].tolist()
    return high << 32 | low
