"""Folders and processes for tests of the command line."""

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import ModelConfig
from afm_mlx.engine.generation import stream_generate
from afm_mlx.loading.load import load
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.models import random_model

# Without int8 codes, whose rounding depends on how many tokens are computed at a time.
CONFIG = ModelConfig(
    vocab_size=1000,
    hidden_dim=32,
    num_layers=3,
    num_kv_reuse_layers=1,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=10000.0,
    kv_bits=None,
    context_length=256,
)
ROOT = Path(afm_mlx.__file__).parent.parent


def write_folder(folder: Path, spm: Path, rng, config: ModelConfig = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    for name, content in _tokenizer_files(spm).items():
        (folder / name).write_bytes(content)
    weights = dict(tree_flatten(random_model(config, rng).parameters()))
    # Logits of 0 are never the highest: no answer ends by itself, whatever the random weights.
    ends = mx.array(sorted(load_tokenizer(folder).eos_token_ids))
    weights["model.embedding.weight"][ends] = 0
    save_weights(folder, weights)
    return folder


def process(*argv, code=None, **options):
    command = [sys.executable, *(["-c", code] if code else ["-m", "afm_mlx"]), *map(str, argv)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


def started(code, *argv, says) -> subprocess.Popen:
    """A process whose first line says that it has come to the place in question."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = subprocess.Popen([sys.executable, "-c", code, *map(str, argv)], **pipes)
    assert running.stdout.readline() == f"{says}\n"
    return running


@lru_cache
def _tokenizer_files(spm: Path) -> dict[str, bytes]:
    """What `save_tokenizer` writes; the conversion takes longer than all the rest of a folder."""
    with TemporaryDirectory() as folder:
        save_tokenizer(spm, folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def answer(folder, prompt, **options):
    """What the library says, with mlx-lm's default of 100 tokens cut to 12."""
    model, tokenizer = load(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True
    )
    return "".join(
        r.text for r in stream_generate(model, tokenizer, ids, **{"max_tokens": 12, **options})
    )


def lines(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def example(task, question, expected):
    return {"task": task, "messages": [{"role": "user", "content": question}], "answer": expected}
