"""Stock `mlx_lm.server`, whose model follows scripts: python -m tests.tools.mlx_lm_server SCRIPTS --model ...

SCRIPTS is a file with a JSON list of texts, see `model_scripts`. All other arguments are the server's.
"""

import json
import sys
from pathlib import Path

from mlx_lm import server
from mlx_lm.utils import load_tokenizer

from tests.tools.model_scripts import FollowsMarker


def main() -> None:
    scripts = json.loads(Path(sys.argv.pop(1)).read_text())
    tokenizer = load_tokenizer(Path(sys.argv[sys.argv.index("--model") + 1]))
    original = server._make_logits_processors
    server._make_logits_processors = lambda args: [
        *(original(args) or []),
        FollowsMarker(tokenizer, scripts),
    ]
    server.main()


if __name__ == "__main__":
    main()
