"""Peak memory of converting a checkpoint of the 3B model's size.

A 16 GB Mac must convert the toolkit's 12.7 GB of float32: the target is 2 GB of memory that is not
backed by a file. Pages of the mapped checkpoint count towards the resident size too, but the system takes
them back whenever it needs room, so both figures are shown.

The checkpoint is made on the spot, of the real shapes and with random numbers, and removed afterwards;
it and the output take 13 GB plus 6 GB (bfloat16) or 13 GB (float32) of disk.

    python -m bench.convert_memory --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

TARGET_BYTES = 2e9
_MAX_ELEMENTS = 153600 * 2048


def make_checkpoint(folder: Path, num_layers: int, num_kv_reuse_layers: int) -> int:
    """Write a toolkit checkpoint with the 3B model's widths; return the bytes of its `.pt` file."""
    import torch
    from tamm.adapters import LoRAModelAdapter
    from tamm.ao.arch_optimizers import KVQuantArchOptimizer
    from tamm.models.afm_text import AFMTextV7
    from tamm.utils import json as tamm_json

    from tests.tools.tokenizers import train_tiny_spm

    config = AFMTextV7.Config(
        num_layers=num_layers,
        num_kv_reuse_layers=num_kv_reuse_layers,
        adapters={"base_adapter": LoRAModelAdapter(rank=32, alpha=16)},
        arch_optimizers={"kv_quant": KVQuantArchOptimizer()},
        device="meta",
    )
    # Every tensor maps the start of one file, so that making 12.7 GB takes no memory either.
    numbers = folder / "numbers"
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    with numbers.open("wb") as file:
        for _ in range(_MAX_ELEMENTS // block.size + 1):
            file.write(block)

    def stand_in(key: str, meta: torch.Tensor) -> torch.Tensor:
        if key.endswith(".range"):
            return torch.tensor([-4.0, 5.0])
        if key.endswith(".num_samples"):
            return torch.tensor(100)
        flat = torch.from_file(str(numbers), size=meta.numel(), dtype=torch.float32)
        return flat.reshape(meta.shape)

    state = {k: stand_in(k, v) for k, v in config.create_model().state_dict().items()}
    state["output_transform.weight"] = state["embedding.weight"]
    torch.save(state, folder / "base-model.pt")
    numbers.unlink()
    config.device = None
    (folder / "base-model-config.json").write_text(tamm_json.dumps(config))
    train_tiny_spm(folder / "tokenizer.model", "bpe")
    return (folder / "base-model.pt").stat().st_size


_CHILD = """
import resource, sys
from afm_mlx.converters.convert import convert
import torch
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3], quantize=sys.argv[4] == "quantize")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
"""


class AnonymousMemory(threading.Thread):
    """Samples a process's memory that no file backs; Linux only, None elsewhere."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self.first = self.read()
        self.peak = self.first

    def read(self) -> int | None:
        try:
            found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text())
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None

    def run(self) -> None:
        while (now := self.read()) is not None and self.peak is not None:
            self.peak = max(self.peak, now)
            time.sleep(0.02)


def measure(source: Path, target: Path, dtype: str, quantize: bool) -> dict[str, float | None]:
    """Convert `source` to `target` in a process of its own; return its peak bytes and its seconds."""
    mode = "quantize" if quantize else "float"
    command = [sys.executable, "-c", _CHILD, str(source), str(target), dtype, mode]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        memory = AnonymousMemory(child.pid)
        memory.start()
        start = time.perf_counter()
        child.stdin.write("\n")
        child.stdin.flush()
        peak = child.stdout.readline()
        seconds = time.perf_counter() - start
    if child.returncode:
        sys.exit(child.returncode)
    files = [path for path in target.rglob("*") if path.is_file()]
    return {
        "seconds": seconds,
        "output_bytes": sum(path.stat().st_size for path in files),
        "peak_rss_bytes": int(peak) * (1 if sys.platform == "darwin" else 1024),
        "anonymous_before_bytes": memory.first,
        "anonymous_peak_bytes": memory.peak,
        "target_bytes": TARGET_BYTES,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("-q", "--quantize", action="store_true", help="pack to 2 bits")
    parser.add_argument("--layers", type=int, default=56, help="fewer for a quick look")
    parser.add_argument("--kv-reuse-layers", type=int, default=21)
    parser.add_argument("--folder", help="where to work; the system's temporary folder by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source = Path(name) / "assets"
        source.mkdir()
        size = make_checkpoint(source, options.layers, options.kv_reuse_layers)
        result = measure(source, Path(name) / "out", options.dtype, options.quantize)
    result = {"checkpoint_bytes": size, "dtype": options.dtype, **result}
    if options.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if key.endswith("_bytes"):
            value = "not known here" if value is None else f"{value / 1e9:.2f} GB"
        elif key == "seconds":
            value = f"{value:.1f}"
        print(f"{key.removesuffix('_bytes').replace('_', ' '):>18}: {value}")


if __name__ == "__main__":
    main()
