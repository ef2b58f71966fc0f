"""Images in requests of all APIs: one prompt for all, bounds, errors, kept conversations, remote images."""

import base64
import gc
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import anthropic
import ollama
import pytest

from afm_mlx.errors import AFMError
from afm_mlx.server import images as images_module
from afm_mlx.server.images import ImageMemory, RequestImages, is_own, is_public
from afm_mlx.server.replies import ApiError
from afm_mlx.server.responses_api import KeptResponse, KeptResponses
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.vision.prompt_image import read_image
from afm_mlx.vision.vision import Vision
from tests.tools.cases import each
from tests.tools.server import running_server, until
from tests.tools.vision import TINY
from tests.tools.vision_server import (
    IMAGE_TOKEN,
    MODEL,
    data_uri,
    in_base64,
    seeing_server,
    square,
)

RED, BLUE = square((220, 20, 20)), square((20, 20, 220), 60, "JPEG")
DIGESTS = [read_image(each, TINY).digest for each in (RED, BLUE)]
ASKED = "Which colour?"
CALL = {"name": "look", "arguments": "{}"}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def seeing():
    with seeing_server(max_tokens=2) as running:
        yield running


@pytest.fixture(scope="module")
def post(seeing):
    with seeing.server.http() as http:
        yield lambda path, body: http.post(path, json={"model": MODEL, **body})


def url_part(content, **more):
    return {"type": "image_url", "image_url": {"url": data_uri(content), **more}}


def input_part(content, **more):
    return {"type": "input_image", "image_url": data_uri(content), **more}


def block(content):
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(content)}
    return {"type": "image", "source": source}


def text(said, kind="text"):
    return {"type": kind, "text": said}


# Each asks with the two pictures before the text.
FORMS = {
    "/v1/chat/completions": lambda *parts: {
        "messages": [
            {
                "role": "user",
                "content": [text(p) if isinstance(p, str) else url_part(p) for p in parts],
            }
        ]
    },
    "/v1/responses": lambda *parts: {
        "input": [
            {
                "role": "user",
                "content": [
                    text(p, "input_text") if isinstance(p, str) else input_part(p) for p in parts
                ],
            }
        ]
    },
    "/v1/messages": lambda *parts: {
        "max_tokens": 2,
        "messages": [
            {
                "role": "user",
                "content": [text(p) if isinstance(p, str) else block(p) for p in parts],
            }
        ],
    },
    "/api/chat": lambda *parts: {
        "stream": False,
        "messages": [
            {
                "role": "user",
                "content": "".join(p if isinstance(p, str) else "[img]" for p in parts),
                "images": [in_base64(p) for p in parts if isinstance(p, bytes)],
            }
        ],
    },
    "/api/generate": lambda *parts: {
        "stream": False,
        "prompt": "".join(p if isinstance(p, str) else "[img]" for p in parts),
        "images": [in_base64(p) for p in parts if isinstance(p, bytes)],
    },
}


@each(
    "parts, places",
    [
        ([RED, BLUE, ASKED], [0, 1]),
        ([ASKED, BLUE, " or ", RED, "?"], [1, 0]),
        ([RED], [0]),
        ([ASKED, RED, RED], [0, 0]),
    ],
)
def test_all_apis_make_the_same_prompt(seeing, post, parts, places):
    prompts = []
    for path, form in FORMS.items():
        answered = post(path, form(*parts))
        assert answered.status_code == 200, answered.text
        assert [image.digest for image in seeing.images] == [DIGESTS[i] for i in places], path
        prompts.append(seeing.prompt)
    assert all(prompt == prompts[0] for prompt in prompts)
    sizes = [image.tokens for image in seeing.images]
    assert prompts[0].count(IMAGE_TOKEN) == sum(sizes)
    # The placeholders are where the pictures are: the texts around them have their own tokens.
    shown = seeing.server.served.tokenizer.decode([t for t in prompts[0] if t != IMAGE_TOKEN])
    assert "".join(part for part in parts if isinstance(part, str)) in shown

    encoder = seeing.server.served.model.vision
    seeing.server.served.model.vision = None  # counting needs no encoder
    try:
        for path, field in (
            ("/v1/responses/input_tokens", "input_tokens"),
            ("/v1/messages/count_tokens", "input_tokens"),
            ("/tokenize", "count"),
        ):
            form = FORMS["/v1/chat/completions" if path == "/tokenize" else path.rpartition("/")[0]]
            body = {k: v for k, v in form(*parts).items() if k != "max_tokens"}
            assert post(path, body).json()[field] == len(prompts[0]), path
    finally:
        seeing.server.served.model.vision = encoder
    strings = post(
        "/tokenize", {**FORMS["/v1/chat/completions"](*parts), "return_token_strs": True}
    )
    assert len(strings.json()["token_strs"]) == len(prompts[0])
    assert strings.json()["tokens"] == prompts[0]


RESULTS = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [text("See:"), url_part(RED)]},
            {"role": "user", "content": [url_part(BLUE)]},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": ASKED},
            {"type": "function_call", "call_id": "c", **CALL},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [text("See:", "input_text"), input_part(RED)],
            },
            {"role": "user", "content": [input_part(BLUE)]},
        ]
    },
    "/v1/messages": {
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [text("See:"), block(RED)],
                    },
                    block(BLUE),
                ],
            },
        ],
    },
    "/api/chat": {
        "stream": False,
        "messages": [
            {"role": "user", "content": ASKED},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
            },
            {"role": "tool", "content": "See:[img]", "images": [in_base64(RED)]},
            {"role": "user", "images": [in_base64(BLUE)]},
        ],
    },
}


def test_images_in_results_of_tools(seeing, post):
    prompts = []
    for path, body in RESULTS.items():
        answered = post(path, body)
        assert answered.status_code == 200, answered.text
        assert [image.digest for image in seeing.images] == DIGESTS, path
        prompts.append(seeing.prompt)
    assert all(prompt == prompts[0] for prompt in prompts)
    # The result of a failed tool is shown as JSON, which leaves the image whole.
    failed = json.loads(json.dumps(RESULTS["/v1/messages"]))
    failed["messages"][2]["content"][0]["is_error"] = True
    assert post("/v1/messages", failed).status_code == 200
    assert [image.digest for image in seeing.images] == DIGESTS
    assert len(seeing.prompt) > len(prompts[0])


@each(
    "size, detail, mode",
    [
        (28, None, "rapid"),
        (29, "auto", "balanced"),
        (85, "auto", "high"),
        (85, "low", "rapid"),
        (10, "high", "high"),
        (10, "original", "high"),
    ],
)
def test_detail_chooses_the_mode(seeing, post, size, detail, mode):
    content, detail = square(size=size), {} if detail is None else {"detail": detail}
    for path, part in (
        ("/v1/chat/completions", url_part(content, **detail)),
        ("/v1/responses", input_part(content, **detail)),
    ):
        message = [{"role": "user", "content": [part]}]
        field = "messages" if "chat" in path else "input"
        assert post(path, {field: message}).status_code == 200
        (image,) = seeing.images
        assert (image.mode, image.tokens) == (mode, TINY.tokens(mode))
        assert seeing.prompt.count(IMAGE_TOKEN) == image.tokens


def test_prompts_with_images_are_logged_and_decoded(seeing, post, caplog, monkeypatch):
    served = seeing.server.served
    monkeypatch.setattr(served, "options", replace(served.options, log_prompts=True))
    with caplog.at_level("INFO", "afm_mlx.server"):
        assert (
            post("/v1/chat/completions", FORMS["/v1/chat/completions"](RED, ASKED)).status_code
            == 200
        )
    assert any(ASKED in record.getMessage() for record in caplog.records)
    found = post("/detokenize", {"tokens": seeing.prompt})
    assert ASKED in found.json()["prompt"]
    scored = {
        **FORMS["/v1/chat/completions"](RED, ASKED),
        "prompt_logprobs": 2,
        "repetition_penalty": 2,
    }
    assert len(post("/v1/chat/completions", scored).json()["prompt_logprobs"]) == len(seeing.prompt)


def test_no_text_makes_an_image(seeing, post):
    """Neither names of tokens nor marks that a client has seen, or that it draws, become placeholders."""
    name = seeing.server.served.tokenizer.convert_ids_to_tokens(IMAGE_TOKEN)
    typed = f"{name} <image> [img] \U000f1234\U00100000 " + chr(0x100000)
    for path, form in FORMS.items():
        body = form(RED, typed)
        if path.startswith("/api/"):  # these put the image in the place of the first [img]
            continue
        assert post(path, body).status_code == 200
        assert seeing.prompt.count(IMAGE_TOKEN) == seeing.images[0].tokens
        assert post(path, form(typed)).status_code == 200
        assert IMAGE_TOKEN not in seeing.prompt


def test_ollamas_prompt_may_be_an_image_alone(seeing, post):
    body = {"images": [in_base64(RED)], "stream": False}
    assert post("/api/generate", {**body, "prompt": ""}).json()["eval_count"] == 2
    prompt = seeing.prompt
    assert post("/api/generate", body).json()["eval_count"] == 2
    assert post("/v1/chat/completions", FORMS["/v1/chat/completions"](RED)).status_code == 200
    assert seeing.prompt == prompt
    assert "eval_count" not in post("/api/generate", {"stream": False}).json()  # it loads the model


def test_images_are_read_in_their_own_threads(seeing, post, monkeypatch):
    threads = []

    def read(*arguments):
        threads.append(threading.current_thread().name)
        return read_image(*arguments)

    monkeypatch.setattr(images_module, "read_image", read)
    for path, form in FORMS.items():
        assert post(path, form(RED)).status_code == 200, path
    assert len(threads) == len(FORMS)
    assert all(name.startswith("server-images") for name in threads)


def test_a_chat_never_waits_for_images(seeing, post, monkeypatch):
    most = (os.cpu_count() or 1) // 4 or 1
    reading, go, found = [], threading.Event(), []

    def slow(*arguments):
        reading.append(1)
        found.append(len(reading))
        go.wait(30)
        reading.pop()
        return read_image(*arguments)

    monkeypatch.setattr(images_module, "read_image", slow)
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(post, path, FORMS[path](RED)) for _ in range(6)]
        until(lambda: len(reading) == most)
        assert post(path, FORMS[path](ASKED)).status_code == 200
        go.set()
        assert {each.result().status_code for each in asked} == {200}
    assert max(found) == most


def message_of(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


NO_IMAGE = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
REFUSED = [
    ("/v1/chat/completions", message_of(text("a"), {"type": "image_url", "image_url": {"url": NO_IMAGE}}),
     "messages[0].content[1].image_url", "PNG, JPEG"),
    ("/v1/chat/completions", message_of({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
     "messages[0].content[0].image_url", "data URI"),
    ("/v1/chat/completions", message_of({"type": "image_url", "image_url": "data:image/png,abc"}),
     "messages[0].content[0].image_url", "base64"),
    ("/v1/chat/completions", message_of({"type": "image_url", "image_url": "data:image/png;base64,a"}),
     "messages[0].content[0].image_url", "base64"),
    ("/v1/chat/completions", message_of({"type": "image_url", "image_url": "data:;base64,é"}),
     "messages[0].content[0].image_url", "base64"),
    ("/v1/chat/completions", message_of(url_part(RED, detail="medium")),
     "messages[0].content[0].image_url.detail", "medium"),
    ("/v1/chat/completions", message_of({"type": "image_url"}), "messages[0].content[0].image_url", "missing"),
    ("/v1/chat/completions", message_of({"type": "input_audio", "input_audio": {}}),
     "messages[0].content[0].type", "text and images only. Allowed are text, image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [url_part(RED)]}]},
     "messages[0].content[0].type", "instructions are text"),
    ("/v1/chat/completions", message_of(url_part(square(size=300)[:-40])),
     "messages[0].content[0].image_url", "image"),
    ("/v1/chat/completions", message_of({"type": "image_url", "image_url": "https://example.com/a.png"}),
     "messages[0].content[0].image_url", "--allow-remote-images"),
    ("/v1/chat/completions", {**message_of(text("a")), "images": [in_base64(RED)]}, "images", "can't honour"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     "input[0].content[0].file_id", "no files"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].image_url", "missing"),
    ("/v1/responses", {"input": [{"role": "assistant", "content": [input_part(RED)]}]},
     "input[0].content[0]", "messages of the user"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", **CALL}, {"call_id": "c",
     "type": "function_call_output", "output": [{"type": "input_image", "image_url": NO_IMAGE}]}]},
     "input[1].output[0].image_url", "PNG"),
    ("/v1/messages", {**message_of(text("a"), {"type": "image", "source": {"type": "file", "file_id": "f"}}),
     "max_tokens": 1}, "messages[0].content[1].source.type", "no files"),
    ("/v1/messages", {**message_of({"type": "image", "source": {"type": "url", "url": "http://localhost/"}}),
     "max_tokens": 1}, "messages[0].content[0].source.url", "--allow-remote-images"),
    ("/v1/messages", {**message_of({"type": "image", "source": {"type": "base64", "data": "@"}}),
     "max_tokens": 1}, "messages[0].content[0].source.data", "base64"),
    ("/api/chat", {"messages": [{"role": "user", "images": [in_base64(RED), "@"]}]}, "messages[0].images[1]",
     "base64"),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
     "images": [in_base64(RED)]}]}, "messages[1].images", "messages of the user"),
    ("/api/chat", {"messages": [{"role": "user", "images": "a"}]}, "messages[0].images", "array"),
    ("/api/generate", {"prompt": "a", "raw": True, "images": [in_base64(RED)]}, "images", "raw"),
    ("/tokenize", message_of({"type": "image_url", "image_url": {"url": NO_IMAGE}}),
     "messages[0].content[0].image_url", "PNG"),
]  # fmt: skip


def reported(response):
    error = response.json()["error"]
    return error if isinstance(error, str) else f"{error.get('param')}: {error['message']}"


@each("path, body, place, said", REFUSED)
def test_what_can_not_be_used_is_refused_with_its_place(post, path, body, place, said):
    streamed = {} if path == "/tokenize" or path.startswith("/api/") else {"stream": True}
    for more in ({}, streamed):
        refused = post(path, {**body, "stream": False, **more} if path != "/tokenize" else body)
        message = reported(refused)
        assert refused.status_code == 400 or ("error" in message and more), message
        assert place in message
        assert said in message


def test_models_that_read_text_only_refuse_images_as_before():
    with running_server() as server, server.http() as http:
        for path, form in FORMS.items():
            refused = http.post(path, json={"model": "afm-nano", **form(RED)})
            assert refused.status_code == 400
            assert "text only" in reported(refused), path
        refused = http.post(
            "/v1/chat/completions", json={"model": "afm-nano", **message_of(url_part(RED))}
        )
        assert reported(refused).endswith("this model reads text only. Allowed are text.")
        listed = http.get("/v1/models").json()
        assert listed["data"][0]["architecture"]["input_modalities"] == ["text"]
        assert listed["models"][0]["capabilities"] == ["completion"]


def test_clients_see_what_the_model_can_do(seeing):
    local = ollama.Client(seeing.server.url)
    assert "vision" in local.show(MODEL).capabilities
    assert "vision" not in ollama.Client(seeing.server.url).list().models[0].model
    with seeing.server.http() as http:
        listed = http.get("/v1/models").json()
        assert listed["models"] == [
            {"name": MODEL, "model": MODEL, "capabilities": ["completion", "multimodal"]}
        ]
        (model,) = listed["data"]
        assert model["architecture"]["input_modalities"] == ["text", "image"]
        assert model["capabilities"]["vision"] is True
    claude = anthropic.Anthropic(base_url=seeing.server.url, api_key="none")
    (model,) = claude.models.list().data
    assert model.capabilities.image_input.supported


def test_encoder_passes_are_counted_and_their_errors_are_the_models(seeing, post, monkeypatch):
    path = "/v1/chat/completions"

    def metric(name):
        with seeing.server.http() as http:
            text = http.get("/metrics").text
        (found,) = re.findall(rf"^afm_mlx:{name}\{{.*\}} (.+)$", text, re.M)
        return float(found)

    before = metric("image_encoder_passes")
    assert post(path, FORMS[path](square((1, 2, 3), 90))).status_code == 200
    assert metric("image_encoder_passes") == before + 5
    assert metric("image_features_bytes") >= 4 * 80 * 16
    with monkeypatch.context() as patch:
        patch.setattr(Vision, "whiten", lambda self, tiles: tiles * float("nan"))
        failed = post(path, FORMS[path](square((3, 2, 1))))
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "no_features"
    assert post(path, FORMS[path](square((3, 2, 1)))).status_code == 200


# -- bounds


def test_bounds(post):
    many = post("/v1/chat/completions", message_of(*[url_part(square(size=4))] * 17))
    assert many.status_code == 400
    assert many.json()["error"]["code"] == "too_many_images"
    assert many.json()["error"]["param"] == "messages[0].content[16].image_url"
    # 1,600 tokens of images fit the context of 2,048, and 2,080 don't; the text is counted, too.
    high = square(size=85)
    parts = [url_part(high)] * (2048 // TINY.tokens("high") + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TINY.__class__, "tokens", lambda self, mode: 300)
        full = post("/v1/chat/completions", message_of(*parts[:7]))
    error = full.json()["error"]
    assert full.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages[0].content[6].image_url"
    long = post("/v1/chat/completions", message_of(*parts[:10], text("a b " * 700)))
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_pixels_and_bytes_are_bounded_by_the_servers_settings():
    settings = {"max_image_pixels": 1600, "max_images": 1, "max_body": 20_000}
    with seeing_server(max_tokens=1, **settings) as seeing, seeing.server.http() as http:

        def post(*parts):
            body = {"model": MODEL, **message_of(*parts)}
            return http.post("/v1/chat/completions", json=body)

        assert post(url_part(square(size=40))).status_code == 200
        large = post(url_part(square(size=41)))
        assert large.status_code == 400
        assert "41 x 41 pixels; allowed are 1,600" in reported(large)
        assert post(url_part(RED), url_part(RED)).json()["error"]["code"] == "too_many_images"
        assert post(url_part(RED + bytes(20_000))).status_code == 413


def test_the_memory_for_images_is_bounded():
    memory = ImageMemory(3 * 28 * 28 * 3)
    options = ServerOptions()
    held = [RequestImages(TINY, 99, options, memory) for _ in range(4)]
    uri = data_uri(square(size=20))
    for images in held[:3]:
        images.mark(uri, "a")
    with pytest.raises(ApiError) as refused:
        held[3].mark(uri, "a")
    assert refused.value.status == 429
    del held[0], images
    gc.collect()
    assert held[2].mark(uri, "a")  # `held[3]` before the deletion


# -- kept responses


def test_kept_conversations_keep_their_images(seeing, post):
    for is_streamed in (False, True):
        client = seeing.server.openai()
        first = [{"role": "user", "content": [text(ASKED, "input_text"), input_part(RED)]}]
        kept = client.responses.create(model=MODEL, input=first, stream=is_streamed)
        kept = list(kept)[-1].response if is_streamed else kept
        second = [{"role": "user", "content": [input_part(BLUE), text("And?", "input_text")]}]
        client.responses.create(model=MODEL, input=second, previous_response_id=kept.id)
        assert [image.digest for image in seeing.images] == DIGESTS
        continued = seeing.prompt
        answer = {"role": "assistant", "content": kept.output_text}
        client.responses.create(model=MODEL, input=[*first, answer, *second])
        assert seeing.prompt == continued
        body = {"input": second, "previous_response_id": kept.id}
        counted = post("/v1/responses/input_tokens", body)
        assert counted.json()["input_tokens"] == len(continued)


def test_kept_images_are_counted_once(seeing):
    kept = KeptResponses(per_client=2, max_bytes=100_000)
    images = RequestImages(TINY, 999, ServerOptions(), ImageMemory())
    images.mark(data_uri(square(size=60)), "a")  # 84 x 84 x 3 = 21,168 bytes
    again = RequestImages(TINY, 999, ServerOptions(), ImageMemory())
    again.carried([], images)
    size = images.images[0].tiles.nbytes
    for number in range(9):
        response = KeptResponse(b"{}", [], images=images if number % 2 else again)
        kept.keep("", str(number), response)
        assert kept._bytes == min(2, number + 1) * 4 + size
    kept.remove("", "8")
    assert kept._bytes == 4 + size
    kept.remove("", "7")
    assert kept._bytes == 0
    kept = KeptResponses(per_client=9, max_bytes=size - 1)
    kept.keep("", "a", KeptResponse(b"{}", [], images=images))
    assert kept.get("", "a") is None


def test_another_model_can_not_continue_a_conversation_with_images():
    first = RequestImages(TINY, 999, ServerOptions(), ImageMemory())
    mark = first.mark(data_uri(RED), "a")
    messages = [{"role": "user", "content": f"a{mark}b"}]
    same = RequestImages(TINY, 999, ServerOptions(), ImageMemory())
    (carried,) = same.carried(messages, first)
    assert same.chat.find(carried["content"]) == first.images
    assert messages == [{"role": "user", "content": f"a{mark}b"}]
    with pytest.raises(ApiError, match="another model"):
        RequestImages(None, 999, ServerOptions(), ImageMemory()).carried(messages, first)
    nothing = RequestImages(None, 999, ServerOptions(), ImageMemory())
    assert nothing.carried(messages, nothing) == messages


# -- remote images


@each(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1",
        "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1",
        "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "192.0.0.192", "168.63.129.16",
    ],
)  # fmt: skip
def test_private_addresses_are_no_public_ones(address):
    assert not is_public(address)


def test_public_addresses():
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1111")
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")
    assert not is_own("2001:db8::1")


@contextmanager
def web(*answers, tls=None):
    """A server at 127.0.0.1 that gives these answers: (status, headers, content); `tls` is its SSL context."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, headers, content = answers[min(len(seen), len(answers) - 1)]
            seen.append((self.path, dict(self.headers)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value.replace("PORT", str(self.server.server_port)))
            self.end_headers()
            if callable(content):
                content(self.wfile)
            else:
                self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        running.socket = tls.wrap_socket(running.socket, server_side=True)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield SimpleNamespace(port=running.server_port, seen=seen)
    finally:
        running.shutdown()
        running.server_close()


@pytest.fixture
def reading(monkeypatch):
    """Read an image from the web; local addresses count as other machines', unless `is_local` is False."""

    def read(url, is_local=True, **settings):
        if is_local:
            monkeypatch.setattr(images_module, "is_public", lambda address: True)
            monkeypatch.setattr(images_module, "is_own", lambda address: False)
        options = ServerOptions(allow_remote_images=True, **settings)
        images = RequestImages(TINY, 999, options, ImageMemory())
        images.mark(url, "messages[0].content[0].image_url")
        return images.images[0]

    return read


def test_remote_images_are_fetched(reading):
    with web((302, {"Location": "/b.png"}, b""), (200, {"Content-Type": "image/png"}, RED)) as site:
        image = reading(f"http://localhost:{site.port}/a.png?x=1")
    assert image.digest == DIGESTS[0]
    assert [path for path, _ in site.seen] == ["/a.png?x=1", "/b.png"]
    assert site.seen[0][1]["Host"] == f"localhost:{site.port}"


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_certificates_are_checked_by_the_name_in_the_address(reading, monkeypatch, tmp_path):
    """The connection is to an IP address, and the certificate has to be of the name that led to it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=right.invalid",
         "-addext", "subjectAltName=DNS:right.invalid", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    names = []
    tls.sni_callback = lambda connection, name, context: names.append(name)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    with web((200, {}, RED), tls=tls) as site:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
            with pytest.raises(ApiError, match="could not be reached"):  # nobody vouches for it
                reading(f"https://right.invalid:{site.port}/")
            patch.setenv("SSL_CERT_FILE", str(certificate))
            assert reading(f"https://right.invalid:{site.port}/").digest == DIGESTS[0]
            with pytest.raises(ApiError, match="could not be reached"):
                reading(f"https://wrong.invalid:{site.port}/")
        assert names == ["right.invalid", "right.invalid", "wrong.invalid"]
        assert len(site.seen) == 1


def drip(stream):
    """Send a byte from time to time, until the client closes the connection."""
    with pytest.raises(OSError):
        for _ in range(1000):
            stream.write(b"x")
            stream.flush()
            threading.Event().wait(0.02)


@each(
    "answers, said",
    [
        ([(404, {}, b"")], "status 404"),
        ([(302, {}, b"")], "status 302"),
        ([(302, {"Location": "/again"}, b"")], "redirects"),
        ([(302, {"Location": "file:///etc/passwd"}, b"")], "no http or https"),
        ([(200, {}, bytes(2000))], "more than 1000 bytes"),
        ([(200, {"Content-Encoding": "gzip"}, b"\x1f\x8b" + bytes(99))], "no format that is read"),
        ([(200, {}, drip)], "longer than 0.3 s"),
    ],
)
def test_remote_images_are_bounded(reading, monkeypatch, answers, said):
    monkeypatch.setattr(images_module, "FETCH_SECONDS", 0.3 if "longer" in said else 10.0)
    with web(*answers) as site, pytest.raises(ApiError) as refused:
        reading(f"http://127.0.0.1:{site.port}/", max_body=1000)
    assert refused.value.status == 400
    assert said in refused.value.message


def test_addresses_of_the_servers_own_network_are_never_reached(reading, monkeypatch):
    with web((200, {}, RED)) as site:
        for host in (
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "2130706433",
            "0x7f.1",
            "[::1]",
            "[::ffff:7f00:1]",
        ):
            with pytest.raises(ApiError) as refused:
                reading(f"http://{host}:{site.port}/", is_local=False)
            assert "can't be fetched" in refused.value.message, host
        with monkeypatch.context() as patch:  # as if this machine had a public address
            patch.setattr(images_module, "is_public", lambda address: True)
            with pytest.raises(ApiError, match="not a public one"):
                reading(f"http://127.0.0.1:{site.port}/", is_local=False)
        assert not site.seen
        # A name is looked up once for each request, and its checked address is the one that is used.
        looked_up = []

        async def public_address(host):
            looked_up.append(host)
            if len(looked_up) > 1:
                raise AFMError("its address is not a public one")
            return "127.0.0.1"

        monkeypatch.setattr(images_module, "public_address", public_address)
        assert reading(f"http://name.invalid:{site.port}/", is_local=False).digest == DIGESTS[0]
        assert site.seen[0][1]["Host"] == f"name.invalid:{site.port}"
    with web((302, {"Location": "http://127.0.0.1:PORT/x"}, b"")) as site:
        looked_up.clear()
        with pytest.raises(ApiError, match="not a public one"):
            reading(f"http://name.invalid:{site.port}/", is_local=False)
        assert looked_up == ["name.invalid", "127.0.0.1"]
        assert len(site.seen) == 1


def test_a_lookup_that_hangs_is_not_waited_for(reading, monkeypatch):
    go, ended = threading.Event(), []

    def hanging(*arguments, **options):
        go.wait(30)
        ended.append(1)
        return []

    monkeypatch.setattr(images_module, "FETCH_SECONDS", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    try:
        with pytest.raises(ApiError, match="longer than"):
            reading("http://name.invalid/")
        assert not ended
    finally:
        go.set()


@each(
    "url",
    [
        "http://", "https://[", "http://a b/", "http://no-such-name.invalid/", "HTTP://127.0.0.1:1/",
        "http://127.0.0.1:0/", "http://127.0.0.1:65536/",
    ],
)  # fmt: skip
def test_broken_addresses(reading, url):
    with pytest.raises(ApiError) as refused:
        reading(url, is_local="127" in url)
    assert refused.value.status == 400
    assert refused.value.param == "messages[0].content[0].image_url"
