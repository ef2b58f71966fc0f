"""mlx-lm's server, on its own `afm7` with the random codes of `peer_mlx_lm`, which no folder can hold.

    python -m bench.server_mlx_lm --sizes JSON --model FOLDER --port 8080

Of the folder it takes the tokenizer. All other arguments go to `mlx_lm server`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import mlx.core as mx
from mlx_lm import server
from mlx_lm.utils import load_tokenizer

from bench.peer_mlx_lm import quantized_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=json.loads, required=True, help="ModelArgs of `afm7`")
    options, others = parser.parse_known_args()

    def load(folder: str, **_: Any) -> tuple[Any, Any, dict[str, Any]]:
        model = quantized_model(options.sizes)
        # In bfloat16 a token takes 8 times as long on a CPU.
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        return model, load_tokenizer(folder), {}

    server.load = load
    sys.argv = ["mlx_lm.server", *others]
    server.main()


if __name__ == "__main__":
    main()
