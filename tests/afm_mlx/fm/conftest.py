"""The embedded model, loaded once, and prompts that it was trained to answer."""

import json

import pytest

from afm_mlx import fm
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model


@pytest.fixture(scope="session")
def nano():
    """A model and its tokenizer."""
    return load()


@pytest.fixture
def model(nano):
    return fm.SystemLanguageModel(model=nano, adapters=nano_adapters())


def nano_adapters():
    folder = resolve_model(EMBEDDED_MODEL) / "adapters"
    return {name: folder / name for name in ("redact", "todo", "triage")}


@pytest.fixture(scope="session")
def chats():
    """The chats of afm-nano's evaluation, by their tasks."""
    found = {}
    for line in (resolve_model(EMBEDDED_MODEL) / "evaluation.jsonl").read_text().splitlines():
        chat = json.loads(line)
        found.setdefault(chat["task"], []).append(chat)
    return found
