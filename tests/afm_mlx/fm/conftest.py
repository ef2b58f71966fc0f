"""The embedded model, loaded once, prompts that it was trained to answer, and tests that are coroutines."""

import asyncio
import gc
import inspect
import json
import weakref

import pytest

from afm_mlx import fm
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is an async function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


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
    """The chats of afm-nano's evaluation by task."""
    found = {}
    for line in (resolve_model(EMBEDDED_MODEL) / "evaluation.jsonl").read_text().splitlines():
        chat = json.loads(line)
        found.setdefault(chat["task"], []).append(chat)
    return found


def freed(kept):
    """Drop all that the list holds; True if that frees each, without the garbage collector's help."""
    seen = [weakref.ref(one) for one in kept]
    gc.disable()
    try:
        kept.clear()
        return all(one() is None for one in seen)
    finally:
        gc.enable()


def entries(session):
    """The JSON of a session's transcript, entry by entry."""
    return [entry.to_dict() for entry in session.transcript]


def roles(session):
    return [entry["role"] for entry in entries(session)]


def texts(session, role):
    """The first text of each entry of a role that has one."""
    return [
        entry["contents"][0]["text"]
        for entry in entries(session)
        if entry["role"] == role and entry.get("contents") and "text" in entry["contents"][0]
    ]
