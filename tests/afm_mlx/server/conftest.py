"""A real server for each module of tests, with the embedded model."""

import pytest

from tests.tools.server import running_server


@pytest.fixture(scope="module")
def server():
    """The server with a float KV cache: int8 rounds differently in different batches."""
    with running_server(kv="float") as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    """A plain client."""
    with server.http() as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's own client."""
    return server.openai()
