"""`/v1/embeddings` and Ollama's routes, through the official clients."""

import base64
import json
import re
import struct
from dataclasses import replace

import numpy as np
import ollama
import openai
import pytest

from afm_mlx import embed, threads
from afm_mlx.adapters.adapter_folder import EmbeddingUse, load_adapter, save_adapter
from afm_mlx.engine.engine import Engine
from afm_mlx.model.model import Model
from afm_mlx.server.prompt_rows import MAX_INPUTS
from tests.tools.cases import each
from tests.tools.server import running_server, several_models
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

TEXTS = ["a cat", "Tax law of <turn_end> 1998\n and later", "b " * 40, "a cat"]


def vectors_of(response):
    assert [item.index for item in response.data] == list(range(len(response.data)))
    return np.array([item.embedding for item in response.data], np.float32)


@pytest.fixture
def ask(client):
    def ask(input=TEXTS, model="afm-nano", **fields):
        return client.embeddings.create(model=model, input=input, **fields)

    return ask


def expected(server, texts, **options):
    """What `embed` gives for the server's model."""
    served = server.served
    return threads.submit(embed, served.model, served.tokenizer, texts, **options).result()


def close(found, wanted, cosine=1e-2):  # of a packed model
    return ((found * wanted).sum(-1) > 1 - cosine).all()


def test_openais_client_gets_equal_vectors_in_both_encodings(server, ask, http):
    # It asks for base64 by itself.
    response = ask()
    found = vectors_of(response)
    assert found.shape == (4, 256)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert close(found, expected(server, TEXTS, adapters=server.served.pool))
    numbers = ask([TEXTS[1]], encoding_format="float")
    alone = ask(TEXTS[1])
    assert numbers.data[0].embedding == alone.data[0].embedding
    body = {"model": "afm-nano", "input": TEXTS[1]}
    raw = http.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    packed = base64.b64decode(raw["data"][0]["embedding"])
    assert struct.unpack("<256f", packed) == tuple(np.float32(numbers.data[0].embedding))
    plain = http.post("/v1/embeddings", json=body).json()
    assert plain["data"][0]["embedding"] == numbers.data[0].embedding
    assert (plain["object"], plain["model"]) == ("list", "afm-nano")


def test_usage_counts_every_token(ask, http):
    response = ask()
    counts = [
        len(
            http.post("/tokenize", json={"prompt": text.replace("<turn_end>", "")}).json()["tokens"]
        )
        for text in (TEXTS[0], TEXTS[2], TEXTS[3])
    ]
    named = ask(TEXTS[1]).usage.prompt_tokens
    assert response.usage.prompt_tokens == sum(counts) + 3 + named  # each has an end
    assert response.usage.total_tokens == response.usage.prompt_tokens


def test_token_ids_are_taken_as_they_are(ask, http):
    ids = http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    whole = [*ids, ids[0]]  # AFM's separator begins and ends a text
    text = vectors_of(ask(TEXTS[0]))
    for given in (whole, [whole]):
        assert close(vectors_of(ask(given)), text)
    assert not close(vectors_of(ask(ids)), text, 1e-3)
    assert len(ask([whole, ids, [5]]).data) == 3


def test_dimensions_pooling_and_instructions(server, ask):
    whole = vectors_of(ask())
    cut = vectors_of(ask(dimensions=16))
    wanted = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    assert cut.shape == (4, 16)
    assert close(cut, wanted)
    mean = vectors_of(ask(extra_body={"pooling": "mean"}))
    assert close(mean, expected(server, TEXTS, pooling="mean", adapters=server.served.pool))
    assert not close(mean, whole, 1e-3)
    queries = vectors_of(ask(extra_body={"instruction": "Find it"}))
    assert close(queries, vectors_of(ask([f"Instruct: Find it\nQuery: {t}" for t in TEXTS])))
    for kind in ("query", "search_document", ""):  # the model alone has no instruction
        assert close(vectors_of(ask(extra_body={"input_type": kind})), whole)


def test_an_adapter_is_a_model_with_its_own_pooling_and_instruction(server, tmp_path):
    source = server.served.pool.paths["todo"]
    tensors, config = threads.submit(load_adapter, source).result()
    use = EmbeddingUse("mean", "Find the to-dos")
    config = replace(config, embedding=use)
    threads.submit(save_adapter, tmp_path / "finder", tensors, config).result()
    with running_server(kv="float", adapter_folders=(tmp_path,)) as running:
        running.http().post("/v1/adapters", json={"name": "finder", "path": "finder"})
        client = running.openai()

        def ask(model, **extra):
            made = client.embeddings.create(model=model, input=TEXTS, extra_body=extra)
            return vectors_of(made)

        found = ask("afm-nano:finder")
        assert close(found, ask("afm-nano:todo", pooling="mean"))
        assert not close(found, ask("afm-nano", pooling="mean"), 1e-4)
        queries = ask("afm-nano:finder", input_type="query")
        assert close(queries, ask("afm-nano:todo", pooling="mean", instruction="Find the to-dos"))
        assert close(ask("afm-nano:finder", pooling="last"), ask("afm-nano:todo"))
        config = tmp_path / "finder" / "adapter_config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"embedding": {"pooling": 3}})
        )
        with pytest.raises(openai.BadRequestError, match="must have a pooling") as info:
            ask("afm-nano:finder")
        assert info.value.param == "model"
        assert str(tmp_path) not in str(info.value)


@each(
    ("fields", "param", "code", "words"),
    [
        ({"input": ""}, "input", "empty_string", "input is an empty text"),
        ({"input": ["a", ""]}, "input[1]", "empty_string", "empty text, which has no vector"),
        ({"input": []}, "input", "empty_array", "input has 0 inputs; 1 to 2048"),
        ({"input": [[]]}, "input", "empty_array", "empty list of token ids"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length", "has 2049 inputs"),
        ({"input": ["a", 1]}, "input", None, "A text, a list of texts"),
        ({"input": [1, 10**6]}, "input", None, "has the token 1000000"),
        ({"input": ["a", "a " * 9000]}, "input[1]", "context_length_exceeded", "9003 tokens"),
        ({"input": [[7] * 9000, [1]]}, "input[0]", "context_length_exceeded", "9000 tokens"),
        ({"dimensions": 257}, "dimensions", "integer_above_max_value", "afm-nano have 256"),
        ({"dimensions": 0}, "dimensions", "invalid_value", ">= 1"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value", "int8"),
        ({"pooling": "max"}, "pooling", "invalid_value", "max"),
        ({"temperature": 0.5}, "temperature", "unsupported_parameter", "can't honour it"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter", "can't"),
    ],
)
def test_bad_requests_have_openais_errors(http, fields, param, code, words):
    body = {"model": "afm-nano", "input": "a", **fields}
    reply = http.post("/v1/embeddings", content=json.dumps(body))
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert re.search(words, error["message"])


def test_other_errors_and_ignored_fields(ask, http, monkeypatch):
    with pytest.raises(openai.NotFoundError, match="There is no model 'nope'"):
        ask(model="nope")
    body = {
        "model": "afm-nano",
        "input": "a",
        "user": "me",
        "unheard_of": 1,
        "encoding_format": None,
    }
    reply = http.post("/v1/embeddings", json=body)
    assert reply.headers["x-afm-ignored"] == "user, unheard_of"
    norm = Model.final_norm
    monkeypatch.setattr(Model, "final_norm", lambda self, h: norm(self, h) * float("nan"))
    with pytest.raises(openai.InternalServerError, match="hidden states hold NaN") as info:
        ask()
    assert info.value.code == "no_embedding"


def test_many_inputs_run_a_few_at_a_time(server, ask, http, monkeypatch):
    most, step = [0], Engine.step

    def counted(self):
        most[0] = max(most[0], self.rows_running + self.rows_waiting)
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    before = metric(http, "request_success_total", 'finished_reason="stop"')
    response = ask([f"text {i % 50}" for i in range(MAX_INPUTS // 8)], dimensions=4)
    assert len(response.data) == MAX_INPUTS // 8
    assert 1 < most[0] <= server.served.options.max_batch
    assert metric(http, "request_success_total", 'finished_reason="stop"') == before + 1
    assert metric(http, "num_requests_running") == metric(http, "num_requests_waiting") == 0


def metric(http, name, labels=""):
    found = re.findall(
        f"^afm_mlx:{name}{{[^}}]*{labels}[^}}]*}} (.*)$", http.get("/metrics").text, re.M
    )
    return sum(map(float, found))


def test_limits_of_answers_hold():
    with running_server(kv="float", timeout=1e-9) as running:
        with pytest.raises(openai.APIStatusError, match="was not complete after") as info:
            running.openai().embeddings.create(model="afm-nano", input="a")
        assert info.value.status_code == 504
    with running_server(kv="float") as running:
        running.served.admission.draining = True
        with pytest.raises(openai.APIStatusError, match="The server is stopping"):
            running.openai().embeddings.create(model="afm-nano", input="a")


def test_models_of_the_zoo_have_vectors_too(tmp_path):
    tokenizer = word_tokenizer_json(64)
    write_zoo_folder(tmp_path / "llama", "llama", zoo_model("llama", 64, 1), tokenizer)
    with several_models("afm-nano", tmp_path / "llama") as running:
        for model, size in (("afm-nano", 256), ("llama", 32)):
            found = vectors_of(running.client.embeddings.create(model=model, input=TEXTS))
            assert found.shape == (4, size)
            assert running.states()[model] == "loaded"


# -- Ollama's routes


def test_ollamas_client_gets_the_same_vectors(server, ask):
    client = ollama.Client(server.url)
    whole, one = vectors_of(ask()), ask(TEXTS[0])
    reply = client.embed("afm-nano:latest", TEXTS)
    assert close(np.array(reply["embeddings"]), whole)
    assert reply["prompt_eval_count"] == ask().usage.prompt_tokens
    assert reply["total_duration"] > 0
    single = client.embed("afm-nano", TEXTS[0], dimensions=16, keep_alive=5, options={"num_ctx": 9})
    assert np.array(single["embeddings"]).shape == (1, 16)
    older = client.embeddings("afm-nano", TEXTS[0])["embedding"]
    assert close(np.array([older]), vectors_of(one))
    assert client.embed("afm-nano", [])["embeddings"] == []
    assert list(client.embeddings("afm-nano", "")["embedding"]) == []


def test_ollamas_texts_are_shortened_unless_that_is_off(server, ask):
    client = ollama.Client(server.url)
    size = server.served.context_size
    text = "cat " * (size + 10)
    found = client.embed("afm-nano", text)
    assert found["prompt_eval_count"] == size
    assert client.embeddings("afm-nano", text)["embedding"]
    with pytest.raises(ollama.ResponseError, match="the context of afm-nano holds"):
        client.embed("afm-nano", text, truncate=False)
    with pytest.raises(ollama.ResponseError, match="empty text"):
        client.embed("afm-nano", ["a", ""])
