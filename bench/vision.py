"""The image encoder next to transformers' ViTDet on PyTorch: seconds of an image in each mode, in turns.

Both have random weights and the same shapes; ours has a register and a final norm besides. It is measured with
float weights and with packed ones, whose activations are rounded to 16 or to 8 bits in products.

    python -m bench.vision --output results
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import mlx.core as mx
import numpy as np

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.measure.machine import threads_in_use
from afm_mlx.measure.random_model import fill_with_random_codes
from afm_mlx.quantization.packed_layers import set_activation_bits
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.vision.encoder import VisionEncoder
from afm_mlx.vision_config import MODES, VisionConfig
from bench.bystanders import Bystanders
from bench.targets import Target, markdown, report

FASTER = 1.5
PEER = "transformers"
PACKED = {"8 bits": (8, 16), "8 bits, int8 activations": (8, 8), "4 bits, int8 activations": (4, 8)}
"""Bits of weights and of activations of the packed encoders, by name."""
OURS = ("float32", *PACKED)

Passes = list[tuple[float, float]]
"""Seconds of every round by the clock, and of all threads' processor time."""

Figures = dict[str, dict[str, Passes]]
"""Passes by mode and encoder."""


def config_of(preset: str) -> VisionConfig:
    found = PRESETS[preset].vision_config
    assert found is not None
    return found


def our_encoder(config: VisionConfig, name: str) -> Callable[[np.ndarray], None]:
    """Return a function that runs our encoder on pixels (T, S, S, 3), a tile at a time as an engine does."""
    encoder = VisionEncoder(config)
    if name in PACKED:
        bits, activation_bits = PACKED[name]
        rule = QuantizationRule(bits, "balanced", "row")
        fill_with_random_codes(encoder, rule, rule)
        set_activation_bits(encoder, activation_bits)
    mx.eval(encoder.eval().parameters())

    def run(pixels: np.ndarray) -> None:
        for tile in pixels:
            mx.eval(encoder(mx.array(tile[None])))

    return run


def peer_encoder(config: VisionConfig, size: int, threads: int) -> Callable[[np.ndarray], None]:
    """Return a function that runs transformers' model of the same shape, made for pixels of `size`."""
    import torch
    from transformers import VitDetConfig, VitDetModel

    torch.set_num_threads(threads)
    few = config.global_layers
    model = VitDetModel(
        VitDetConfig(
            hidden_size=config.hidden_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            mlp_ratio=config.mlp_dim // config.hidden_dim,
            image_size=size,
            pretrain_image_size=config.position_size,
            patch_size=config.patch_size,
            window_block_indices=[i for i in range(config.num_layers) if i not in few],
            window_size=config.window_size,
        )
    ).eval()

    def run(pixels: np.ndarray) -> None:
        with torch.inference_mode():
            model(torch.from_numpy(pixels.transpose(0, 3, 1, 2)))

    return run


def measure(
    config: VisionConfig, modes: list[str], names: list[str], rounds: int, threads: int
) -> Figures:
    """Measure encoders in turns, so that a machine's moods hit all alike; the first round is a warm-up."""
    rng, figures = np.random.default_rng(0), {}
    encoders = {name: our_encoder(config, name) for name in names}
    for mode in modes:
        size = config.tile_size(mode)
        shape = (config.num_tiles(mode), size, size, 3)
        pixels = rng.standard_normal(shape, dtype=np.float32)
        runs = {PEER: peer_encoder(config, size, threads), **encoders}
        figures[mode] = passes = {name: [] for name in runs}
        for turn in range(rounds + 1):
            for name, run in runs.items():
                start, used = time.perf_counter(), time.process_time()
                run(pixels)
                taken = time.perf_counter() - start, time.process_time() - used
                passes[name] += [taken] if turn else []
                clock, processors = (f"{seconds:.2f}" for seconds in taken)
                print(f"{mode}, {name}: {clock} s, {processors} s of processors", file=sys.stderr)
        del runs
        gc.collect()
    return figures


def ratio(passes: dict[str, Passes], name: str, clock: int = 0) -> float:
    """Return the median of the peer's seconds over an encoder's, round by round.

    `clock` is the index in `Passes`: 1 for processor time.
    """
    pairs = zip(passes[PEER], passes[name], strict=True)
    return statistics.median(peer[clock] / own[clock] for peer, own in pairs)


def targets(figures: Figures) -> list[Target]:
    return [
        Target(f"{mode}, {name}, times as fast as {PEER}", ratio(passes, name), FASTER)
        for mode, passes in figures.items()
        for name in passes
        if name != PEER
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vision", description=__doc__)
    parser.add_argument("--preset", choices=["afm-3b-vision"], default="afm-3b-vision")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--encoders", nargs="+", choices=OURS, default=list(OURS), metavar="NAME")
    parser.add_argument("--rounds", type=integer(1), default=3)
    parser.add_argument("--output", type=Path, help="folder for vision.json, all figures")
    options = parser.parse_args(argv)
    config, bystanders, threads = config_of(options.preset), Bystanders(), threads_in_use()
    figures = measure(config, options.modes, options.encoders, options.rounds, threads)
    others = bystanders.processors()
    print(f"{options.preset}, random weights, {threads} threads\n")
    rows = [["mode", "encoder", "seconds", "of processors", f"times {PEER}", "of processors"]]
    for mode, passes in figures.items():
        for name, taken in passes.items():
            medians = (statistics.median(each) for each in zip(*taken, strict=True))
            times = ratio(passes, name), ratio(passes, name, 1)
            rows.append([mode, name, *(f"{n:.2f}" for n in (*medians, *times))])
    print(markdown(rows) + "\n")
    path = None if options.output is None else options.output / "vision.json"
    report(targets(figures), others, path, {"preset": options.preset, "passes": figures})


if __name__ == "__main__":
    main()
