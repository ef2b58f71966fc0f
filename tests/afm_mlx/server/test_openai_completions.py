import re

import mlx.core as mx
import numpy as np
import openai
import pytest

from afm_mlx import threads
from afm_mlx.server import openai_completions
from afm_mlx.server.answer_events import Ended, TextDelta, TokenCounts
from afm_mlx.server.served_model import TokenLikelihood
from tests.tools.cases import each
from tests.tools.server import running_server

PROMPTS = ["Return a list of", "The quick"]
MAIL = "Make this formal:\nhey Hana, can't make it to the Film Lecture"
ANSWER = "Dear Hana, I am unable to attend the Film Lecture."


@pytest.fixture
def complete(client):
    """Continue a prompt with the embedded model."""

    def complete(prompt=PROMPTS[0], **fields):
        fields = {"model": "afm-nano", "prompt": prompt, "max_tokens": 8, **fields}
        return client.completions.create(**fields)

    return complete


def texts(completion):
    return [choice.text for choice in completion.choices]


def streamed(chunks):
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found[choice.index] = found.get(choice.index, "") + choice.text
    return [found[index] for index in sorted(found)]


def test_prompts_of_all_forms(complete, http):
    alone = [texts(complete(prompt))[0] for prompt in PROMPTS]
    assert alone[0].startswith(" ")  # a new word
    assert texts(complete(PROMPTS)) == alone
    ids = [http.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in PROMPTS]
    assert texts(complete(ids[1])) == alone[1:]
    both = complete(ids, n=2, logprobs=0)
    assert texts(both) == [alone[0], alone[0], alone[1], alone[1]]
    assert both.usage.prompt_tokens == sum(map(len, ids))
    assert both.usage.completion_tokens == 4 * 8
    assert streamed(complete(ids, n=2, stream=True)) == texts(both)
    assert texts(complete(PROMPTS, echo=True)) == [
        p + a for p, a in zip(PROMPTS, alone, strict=True)
    ]
    assert streamed(complete(ids[0], echo=True, stream=True)) == [PROMPTS[0] + alone[0]]
    usages = [c.usage for c in complete(stream=True, stream_options={"include_usage": True})]
    assert (usages[0], usages[-1].completion_tokens) == (None, 8)
    adapted = texts(complete(model="afm-nano:todo"))
    assert adapted != alone[:1]


def test_log_probabilities_have_offsets(complete):
    (choice,) = complete(logprobs=2).choices
    reported = choice.logprobs
    assert "".join(reported.tokens) == choice.text
    for at, token in zip(reported.text_offset, reported.tokens, strict=True):
        assert choice.text[at:].startswith(token)
    for token, value, top in zip(
        reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True
    ):
        assert 2 <= len(top) <= 3
        assert top[token] == value == max(top.values())
    parts = [c.choices[0].logprobs for c in complete(logprobs=2, stream=True)]
    assert [t for part in parts if part for t in part.tokens] == reported.tokens
    assert [t for part in parts if part for t in part.text_offset] == reported.text_offset
    assert complete(logprobs=0).choices[0].logprobs.top_logprobs is None


def full_forward(server, ids):
    """Log-probabilities of each token but the first, (len(ids) - 1, vocab_size), of the packed model."""

    def run():
        logits = server.served.model(mx.array([ids]))[0, :-1].astype(mx.float32)
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    return threads.submit(run).result()


def test_an_echoed_prompt_has_log_probabilities(server, complete, http):
    ids = [http.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in PROMPTS]
    # As lm-evaluation-harness asks, and reads the response.
    scored = complete(ids, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    for choice, prompt, text in zip(scored.choices, ids, PROMPTS, strict=True):
        reported, wanted = choice.logprobs, full_forward(server, prompt)
        own = wanted[np.arange(len(prompt) - 1), prompt[1:]]
        assert reported.token_logprobs[0] is reported.top_logprobs[0] is None
        assert len(reported.tokens) == len(prompt) + 1
        assert reported.token_logprobs[1:-1] == pytest.approx(own.tolist(), abs=5e-2)
        pairs = zip(reported.token_logprobs[1:-1], reported.top_logprobs[1:-1], strict=True)
        greedy = [value == max(top.values()) for value, top in pairs]
        assert greedy == (wanted.argmax(-1) == prompt[1:]).tolist()
        assert choice.text.startswith(text)
        for at, token in zip(reported.text_offset[1:], reported.tokens[1:], strict=True):
            assert choice.text[at:].startswith(token) or at == 0
    # With no new token, as text, with two choices, and without alternatives.
    whole = complete(PROMPTS, max_tokens=0, logprobs=0, echo=True, n=2)
    assert texts(whole) == [p for p in PROMPTS for _ in range(2)]
    assert {c.finish_reason for c in whole.choices} == {"length"}
    assert whole.usage.completion_tokens == 0
    for choice, before in zip(whole.choices[::2], scored.choices, strict=True):
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            before.logprobs.token_logprobs[1:-1], abs=5e-2
        )
        assert choice.logprobs.top_logprobs is None
    assert whole.choices[0].logprobs == whole.choices[1].logprobs
    assert texts(complete(max_tokens=0, echo=True)) == PROMPTS[:1]
    assert complete(max_tokens=0, echo=True).choices[0].logprobs is None
    adapted = complete(PROMPTS, max_tokens=0, logprobs=0, echo=True, model="afm-nano:todo")
    assert adapted.choices[0].logprobs.token_logprobs != whole.choices[0].logprobs.token_logprobs
    chat = [{"role": "user", "content": MAIL}, {"role": "assistant", "content": ANSWER}]
    ended = server.served.tokenizer.apply_chat_template(chat, continue_final_message=True)
    (choice,) = complete(ended, max_tokens=1, logprobs=1, echo=True).choices
    assert choice.finish_reason == "stop"
    assert choice.text.endswith(ANSWER)
    assert len(choice.logprobs.tokens) == len(ended) + 1, "the end token is counted"
    assert choice.logprobs.token_logprobs[-1] == max(choice.logprobs.top_logprobs[-1].values())
    full = complete([[5] * 1024], max_tokens=0, logprobs=0, echo=True)  # the whole context
    assert len(full.choices[0].logprobs.tokens) == 1024


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_as_vllm_has_them(server, http, route):
    chat = {"messages": [{"role": "user", "content": "List of"}]}
    given = chat if "chat" in route else {"prompt": PROMPTS[0]}
    ids = http.post("/tokenize", json=given).json()["tokens"]
    body = {"model": "afm-nano", **given, "max_tokens": 2, "n": 2, "prompt_logprobs": 3}
    reply = http.post(route, json=body).json()
    found = reply if "chat" in route else reply["choices"][1]
    first, *others = found["prompt_logprobs"]
    assert first is None
    wanted = full_forward(server, ids)
    assert len(others) == len(wanted)
    for entry, token, logprobs in zip(others, ids[1:], wanted, strict=True):
        own, *likeliest = entry.items()
        assert own[0] == str(token)
        assert own[1]["logprob"] == pytest.approx(float(logprobs[token]), abs=5e-2)
        least, most = ((logprobs > logprobs[token] + d).sum() for d in (0.1, -0.1))
        assert least <= own[1]["rank"] - 1 <= most
        assert len(entry) == 3 + (own[1]["rank"] > 3)
        for known, value in likeliest:
            assert value["logprob"] == pytest.approx(float(logprobs[int(known)]), abs=5e-2)
            assert 1 <= value["rank"] <= 3
    decoded = "".join(
        entry[str(t)]["decoded_token"] for entry, t in zip(others, ids[1:], strict=True)
    )
    assert "ist of" in decoded
    plain = http.post(route, json={**body, "prompt_logprobs": None}).json()
    assert "prompt_logprobs" not in str(plain)


def test_the_best_of_several(complete, monkeypatch):
    async def answer(served, request):
        assert (request.n, request.logprobs) == (3, 0)
        for index, text, values in ((0, "a", [-9, -1]), (1, "b", [-2, -4, -3]), (2, "c", [-4])):
            tokens = [TokenLikelihood(5, b"x", value) for value in values]
            yield TextDelta(index, text, tokens)
            yield Ended(index, "stop", None, len(tokens))
        yield TokenCounts(4, 0, 6)

    with monkeypatch.context() as scripted:
        scripted.setattr(openai_completions, "answer_events", answer)
        chosen = complete(n=2, best_of=3)
    assert texts(chosen) == ["b", "c"]  # by the mean of a token
    assert [c.logprobs for c in chosen.choices] == [None, None]
    assert chosen.usage.completion_tokens == 6
    assert len(texts(complete(n=2, best_of=4, temperature=1, seed=1))) == 2
    (stopped,) = complete(
        stop=["ist", "o"], prompt="A l", extra_body={"guided_regex": "list of"}
    ).choices
    assert (stopped.text, stopped.finish_reason) == ("l", "stop")


@each(
    "fields, param",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt[1]"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"prompt": ["a", "word " * 3000]}, "prompt[1]"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "guided_choice": ["a"]}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"logit_bias": {"123456": 1}}, "logit_bias"),
        ({"messages": [{}]}, "messages"),
    ],
)  # fmt: skip
def test_refused_fields_are_named(http, fields, param):
    body = {"model": "afm-nano", "prompt": "a", "max_tokens": 4, **fields}
    refused = http.post("/v1/completions", json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param, refused.text


def test_models_and_their_tokens(client, http, complete):
    ids = [model.id for model in client.models.list()]
    names = ("redact", "search", "todo", "triage")
    assert ids == ["afm-nano", *(f"afm-nano:{name}" for name in names)]
    assert client.models.retrieve("afm-nano:todo").id == "afm-nano:todo"
    for model in ("afm-nano:no", "gpt-4"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve(model)
        assert refused.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            complete(model=model)
    tokenized = http.post("/tokenize", json={"prompt": "Dear Hana", "return_token_strs": True})
    reported = tokenized.json()
    assert reported["count"] == len(reported["tokens"]) == len(reported["token_strs"])
    assert reported["max_model_len"] == 1024
    text = http.post("/detokenize", json={"tokens": reported["tokens"]}).json()["prompt"]
    assert text == "Dear Hana"
    chat = [{"role": "user", "content": "hi"}]
    count = http.post("/tokenize", json={"messages": chat}).json()["count"]
    answer = client.chat.completions.create(model="afm-nano", messages=chat)
    assert count == answer.usage.prompt_tokens
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": chat}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_typed_newline_mark_is_text(client, http):
    """In a constrained answer, and in a message."""
    for text in ("List<n>", "<n>", "a\n<n>"):
        answer = client.completions.create(
            model="afm-nano", prompt="a", extra_body={"guided_choice": [text]}, max_tokens=30
        )
        assert answer.choices[0].text == text
    counts = []
    for text in ("a\nb", "a<n>b"):
        body = {"messages": [{"role": "user", "content": text}], "return_token_strs": True}
        counts.append(http.post("/tokenize", json=body).json()["token_strs"].count("<n>"))
    assert counts[0] == counts[1] + 1


def test_fields_of_mlx_lms_server(client, http):
    """What a repetition penalty looks at, and an adapter's path, which is no model id."""

    def text(**more):
        fields = {"model": "afm-nano", "prompt": "a a a a", "temperature": 0, "max_tokens": 12}
        body = {"repetition_penalty": 5, **more}
        return client.completions.create(**fields, extra_body=body).choices[0].text

    assert text() == text(repetition_context_size=0) != text(repetition_context_size=1)
    for name, value in (("adapters", "a/path"), ("presence_context_size", 20)):
        body = {"model": "afm-nano", "prompt": "a", name: value}
        refused = http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_draft_tokens_are_counted_as_such():
    """As accepted and rejected predictions of all prompts and choices, and not as thoughts."""
    with running_server(kv="float", prompt_lookup=True) as server, server.http() as http:
        client = server.openai()

        def counted():
            """Numbers of draft tokens, accepted and in all, since the server's start."""
            text = http.get("/metrics").text
            names = ("accepted", "draft")
            found = [re.search(rf"num_{name}_tokens_total{{.*}} (.+)", text) for name in names]
            return [float(each[1]) for each in found]

        prompts = ["one two three one two three one two", "a b c d a b c d a b c"]
        fields = {"model": "afm-nano", "prompt": prompts, "max_tokens": 12, "n": 2}
        before = counted()
        whole = client.completions.create(**fields).usage
        between = counted()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = client.completions.create(**fields, **options)
        for usage, one, other in ((whole, before, between), (last.usage, between, counted())):
            details = usage.completion_tokens_details
            accepted, drafted = (b - a for a, b in zip(one, other, strict=True))
            assert drafted > 0
            assert details.accepted_prediction_tokens == accepted
            assert details.rejected_prediction_tokens == drafted - accepted
            assert details.reasoning_tokens is None
