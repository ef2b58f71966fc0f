"""`/v1/rerank`: relevance against a full forward of each chat, errors, and the shared prefix."""

import re

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import threads
from afm_mlx.server.reranking import INSTRUCTION, SYSTEM, asked
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from tests.tools.cases import each
from tests.tools.server import running_server
from tests.tools.zoo_chats import FAMILIES, write_tokenizer

QUERY = "Where does the film lecture take place?"
DOCUMENTS = [
    "The film lecture takes place at Hall Prom.",
    "An order of ten boxes.",
    "List of <turn_end> names\nand more",
    "The film lecture takes place at Hall Prom.",
]


@pytest.fixture
def rank(http):
    def rank(route="/v1/rerank", **fields):
        body = {"model": "afm-nano", "query": QUERY, "documents": DOCUMENTS, **fields}
        return http.post(route, json=body)

    return rank


def brute_force(server, documents, instruction=INSTRUCTION, adapter=None):
    """P(yes) / (P(yes) + P(no)) of each document, by a full forward of the model."""
    found = []
    for document in documents:
        prompt, yes, no = asked(server.served, instruction, QUERY, document)
        run = lambda p=prompt: np.array(server.served.model(mx.array([p]))[0, -1], np.float64)  # noqa: E731
        logits = threads.submit(run).result()
        p = np.exp(logits - logits.max())
        found.append(p[yes] / (p[yes] + p[no]))
    return found


def scores_of(reply):
    return {each["index"]: each["relevance_score"] for each in reply.json()["results"]}


def test_the_order_is_that_of_the_models_own_probabilities(server, rank):
    wanted = brute_force(server, DOCUMENTS)
    reply = rank()
    scores = scores_of(reply)
    assert list(scores) == sorted(scores, key=lambda i: -scores[i])
    # The model is packed, and rounds otherwise for other numbers of tokens.
    np.testing.assert_allclose([scores[i] for i in range(4)], wanted, rtol=5e-2)
    by_force = sorted(range(4), key=lambda i: -wanted[i])
    gaps = [abs(wanted[a] - wanted[b]) for a, b in zip(by_force, list(scores), strict=True)]
    assert max(gaps) <= 5e-2 * max(wanted)
    assert scores[0] == pytest.approx(scores[3], rel=5e-2)
    body = reply.json()
    tokens = sum(len(asked(server.served, INSTRUCTION, QUERY, d)[0]) for d in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["model"] == "afm-nano"
    assert re.fullmatch("rerank-[0-9a-f]{32}", body["id"])


def test_results_are_as_requested(rank):
    whole = scores_of(rank())
    best = list(whole)[:2]
    reply = rank("/rerank", top_n=2, return_documents=True).json()
    assert [each["index"] for each in reply["results"]] == best
    assert [each["document"]["text"] for each in reply["results"]] == [DOCUMENTS[i] for i in best]
    objects = [{"text": text, "title": "none"} for text in DOCUMENTS]
    assert scores_of(rank("/v2/rerank", documents=objects, top_n=99)) == pytest.approx(
        whole, rel=5e-2
    )
    other = scores_of(rank(instruction="Find boxes"))
    assert other != pytest.approx(whole, rel=1e-6)
    adapted = scores_of(rank(model="afm-nano:todo"))
    assert adapted != pytest.approx(whole, rel=1e-3)
    assert len(scores_of(rank(documents=["alone"]))) == 1


def test_documents_share_the_query_and_leave_nothing_else_behind(server, rank):
    query = "Which of these texts names a hall, " * 3
    cache = server.served.prefix_cache
    before = cache.tokens
    first = rank(query=query, documents=["a", "b"])
    new = cache.tokens - before
    a, b = (asked(server.served, INSTRUCTION, query, document)[0] for document in ("a", "b"))
    common = next(i for i in range(len(a)) if a[i] != b[i])
    assert 0 < new < common  # the first page is older than this test
    hits = cache.hits
    again = rank(query=query, documents=["a", "b"])
    assert cache.tokens - before == new
    assert cache.hits - hits == 3 * (common - 1)  # for the query, and for each document
    assert scores_of(again) == pytest.approx(scores_of(first), rel=5e-2)


@each(
    ("fields", "param", "code", "words"),
    [
        ({"query": ""}, "query", "empty_string", "query is an empty text"),
        ({"query": 3}, "query", "invalid_value", "query can't be used"),
        ({"documents": []}, "documents", "empty_array", "0 texts; 1 to 2048"),
        ({"documents": ["a"] * 2049}, "documents", "array_above_max_length", "2049 texts"),
        ({"documents": ["a", 3]}, "documents[1]", "invalid_value", "documents"),
        (
            {"documents": ["a", {"title": "b"}]},
            "documents[1].text",
            "missing_required_parameter",
            "",
        ),
        (
            {"documents": ["a", "b " * 2000]},
            "documents[1]",
            "context_length_exceeded",
            "holds 1024",
        ),
        ({"top_n": 0}, "top_n", "invalid_value", ">= 1"),
        (
            {"max_tokens_per_doc": 3},
            "max_tokens_per_doc",
            "unsupported_parameter",
            "never shortened",
        ),
        ({"rank_fields": ["a"]}, "rank_fields", "unsupported_parameter", "one text"),
        ({"query": None}, "query", "invalid_value", ""),
    ],
)
def test_bad_requests_have_openais_errors(rank, fields, param, code, words):
    reply = rank(**fields)
    error = reply.json()["error"]
    assert reply.status_code == 400, error
    assert (error["param"], error["code"]) == (param, code), error
    assert re.search(words, error["message"])
    assert rank(rank_fields=["text"], truncation=True).headers["x-afm-ignored"] == "truncation"


def test_a_model_without_chats_says_so(tmp_path):
    from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

    folder = tmp_path / "llama"
    write_zoo_folder(folder, "llama", zoo_model("llama", 64, 1), word_tokenizer_json(64))
    with running_server(source=folder) as running:
        body = {"model": "llama", "query": QUERY, "documents": ["a"]}
        reply = running.http().post("/v1/rerank", json=body)
    assert reply.status_code == 400
    assert "has no chat template" in reply.json()["error"]["message"]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_the_two_answers_differ_in_the_token_that_is_scored(server, family, tmp_path, monkeypatch):
    from mlx_lm.tokenizer_utils import load

    write_tokenizer(tmp_path, family)
    tokenizer = ZooTokenizer.of(load(tmp_path))
    monkeypatch.setattr(server.served, "tokenizer", tokenizer)
    monkeypatch.delitem(vars(server.served), "thoughts", raising=False)
    prompt, yes, no = asked(server.served, INSTRUCTION, QUERY, DOCUMENTS[2])
    monkeypatch.delitem(vars(server.served), "thoughts", raising=False)
    assert yes != no
    text = tokenizer.decode(prompt)
    assert SYSTEM in text
    assert text.index(f"<Query>: {QUERY}") < text.index(f"<Document>: {DOCUMENTS[2]}")
    assert "yes".startswith(tokenizer.decode([yes]).strip() or "y")
    assert "no".startswith(tokenizer.decode([no]).strip() or "n")
