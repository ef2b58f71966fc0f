"""Weights in ASTC blocks of 6 x 6 (3.56 bits) after the largest singular vectors, as in Apple's server model.

    python examples/astc_study.py

prints relative errors of ASTC's HDR blocks, and of plain formats of as many bits, for a random matrix and for
one whose singular values fall. GPUs decode such blocks when they read textures; MLX reads none, so this is no
format here. `afm-mlx convert -q --svd-adapter` is the part that helps.

A block is a luminance HDR block (mode 2) with a full grid of 6 x 6 weights of 6 levels: 17 bits of header, two
endpoints of 8 bits, 94 bits of weights, 127 of 128 bits. Values are made positive first: the minimum of a block
is kept in 16 bits. Levels are exact fifths between the endpoints, where the standard rounds to 64ths.

Sources: arXiv 2507.13575; Khronos Data Format Specification 1.3, chapter 23 (ASTC).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

SIDE = 6
LEVELS = 6
BLOCK_BITS = 128
SIZE = 576
RANKS = (0, 16, 32, 64)


def decode(code: np.ndarray) -> np.ndarray:
    """Return the numbers of 16-bit HDR values, which are nearly logarithms."""
    exponent, mantissa = code >> 11, code & 0x7FF
    straight = np.where(mantissa < 512, 3 * mantissa, 4 * mantissa - 512)
    straight = np.where(mantissa < 1536, straight, 5 * mantissa - 2048)
    halves = ((exponent << 10) + (straight >> 3)).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


def blocks_of(matrix: np.ndarray) -> np.ndarray:
    """Cut a matrix, whose sides 6 divides, into blocks (n, 36)."""
    rows, columns = (n // SIDE for n in matrix.shape)
    cut = matrix.reshape(rows, SIDE, columns, SIDE).swapaxes(1, 2)
    return cut.reshape(-1, SIDE * SIDE)


def matrix_of(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows, columns = (n // SIDE for n in shape)
    return blocks.reshape(rows, columns, SIDE, SIDE).swapaxes(1, 2).reshape(shape)


def astc(matrix: np.ndarray) -> np.ndarray:
    """Round a matrix to ASTC blocks: the best of 120 pairs of endpoints for each block."""
    scale = np.abs(matrix).max()
    blocks = blocks_of(matrix / scale)
    low = blocks.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    x = np.maximum(blocks - low, 0)
    ends = decode(np.arange(123) << 8)  # up to the code of the largest difference, 2
    largest = np.searchsorted(ends, x.max(axis=1))
    best = np.full(len(x), np.inf)
    found = np.zeros_like(x)
    for above in range(-3, 2):
        for below in range(2, 50, 2):
            last = np.clip(largest + above, 0, 255)
            first = np.maximum(last - below, 0)
            steps = np.arange(LEVELS) / (LEVELS - 1)
            codes = (first[:, None] + (last - first)[:, None] * steps) * 256
            levels = decode(codes.astype(np.int64))  # (blocks, 6), ascending
            middles = (levels[:, 1:] + levels[:, :-1]) / 2
            index = (x[:, :, None] > middles[:, None]).sum(axis=2)
            rounded = np.take_along_axis(levels, index, axis=1)
            error = np.square(rounded - x).sum(axis=1)
            is_better = error < best
            best[is_better], found[is_better] = error[is_better], rounded[is_better]
    return matrix_of(found + low, matrix.shape) * scale


def linear(matrix: np.ndarray) -> np.ndarray:
    """Round a matrix to 6 even levels between the extremes of each block of 6 x 6."""
    blocks = blocks_of(matrix)
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    step = (high - low) / (LEVELS - 1)
    return matrix_of(np.round((blocks - low) / step) * step + low, matrix.shape)


def affine(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    def rounded(matrix: np.ndarray) -> np.ndarray:
        parts = mx.quantize(mx.array(matrix), 64, bits)
        return np.array(mx.dequantize(*parts, 64, bits))

    return rounded


def errors(
    matrix: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray], ranks: tuple[int, ...] = RANKS
) -> list[float]:
    """Return the relative errors in percent with the largest singular vectors kept apart, by their number."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    found = []
    for rank in ranks:
        rest = (matrix - (u[:, :rank] * s[:rank]) @ v[:rank]).astype(np.float32)
        lost = np.linalg.norm(rest - rounded(rest))
        found.append(float(100 * lost / np.linalg.norm(matrix)))
    return found


def matrices(size: int = SIZE) -> dict[str, np.ndarray]:
    """Return a Gaussian matrix, and one whose i-th singular value is i^-1/2."""
    gaussian = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    u, _, v = np.linalg.svd(gaussian)
    falling = (u * np.arange(1, size + 1) ** -0.5) @ v
    return {"Gaussian": gaussian, "singular values i^-1/2": falling.astype(np.float32)}


def main() -> None:
    bits = BLOCK_BITS / SIDE**2
    formats = {
        f"ASTC HDR, {bits:.2f} bits, {bits + 16 / SIDE**2:.2f} with minimum": astc,
        "6 even levels, 6 x 6": linear,
        "affine, 3 bits, groups of 64 (3.50)": affine(3),
        "affine, 4 bits, groups of 64 (4.50)": affine(4),
    }
    for name, matrix in matrices().items():
        print(
            f"{name}: relative error in %, with {', '.join(map(str, RANKS))} singular vectors apart"
        )
        for title, rounded in formats.items():
            print(f"  {title:45}", *(f"{error:5.1f}" for error in errors(matrix, rounded)))


if __name__ == "__main__":
    main()
