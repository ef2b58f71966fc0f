"""The rules of all fields of requests, and the table that has them."""

import json
import re
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from ollama import _types as ollama_types
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from afm_mlx.server.field_rules import (
    MAX_IGNORED,
    Honoured,
    Ignored,
    Kinds,
    Reader,
    Refused,
    rules_of,
)
from afm_mlx.server.replies import ApiError
from afm_mlx.server.request_fields import OTHER_SERVERS, REQUESTS, all_fields, known_elsewhere
from afm_mlx.server.request_fields.anthropic_messages import MessageRequest
from afm_mlx.server.request_fields.embeddings import EmbeddingRequest, RerankRequest
from afm_mlx.server.request_fields.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from afm_mlx.server.request_fields.openai_chats import ChatRequest, CompletionRequest
from afm_mlx.server.request_fields.openai_responses import ResponseRequest
from tests.tools.cases import each
from tests.tools.server import running_server

USER = {"role": "user", "content": "Hi"}
CHAT_TOOL = {"type": "function", "function": {"name": "look"}}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT_ANSWER = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c", "content": "a tree"}
TEXT = {"type": "text", "text": "Hi"}
TOOL = {"type": "function", "name": "look"}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "a tree"}
INPUT_TEXT = {"type": "input_text", "text": "Hi"}
OUTPUT_TEXT = {"type": "output_text", "text": "So"}
CLAUDE_TOOL = {"name": "look", "input_schema": {"type": "object"}}
CLAUDE_CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
CLAUDE_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "a tree"}
OLLAMA_CALL = {"function": {"name": "look", "arguments": {}}}
OLLAMA_ANSWER = {"role": "assistant", "content": "", "tool_calls": [OLLAMA_CALL]}
OLLAMA_RESULT = {"role": "tool", "content": "a tree", "tool_name": "look"}
CACHE = {"type": "ephemeral"}

PATHS = {
    ChatRequest: "/v1/chat/completions",
    CompletionRequest: "/v1/completions",
    ResponseRequest: "/v1/responses",
    MessageRequest: "/v1/messages",
    OllamaChatRequest: "/api/chat",
    OllamaGenerateRequest: "/api/generate",
    EmbeddingRequest: "/v1/embeddings",
    RerankRequest: "/v1/rerank",
    OllamaEmbedRequest: "/api/embed",
    OllamaEmbeddingRequest: "/api/embeddings",
}
LEAST: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [USER], "max_tokens": 1},
    CompletionRequest: {"prompt": "Hi", "max_tokens": 1},
    ResponseRequest: {"input": [USER], "max_output_tokens": 1},
    MessageRequest: {"messages": [USER], "max_tokens": 1},
    OllamaChatRequest: {"messages": [USER], "options": {"num_predict": 1}},
    OllamaGenerateRequest: {"prompt": "Hi", "options": {"num_predict": 1}},
    EmbeddingRequest: {"input": "Hi"},
    RerankRequest: {"query": "Hi", "documents": ["So"]},
    OllamaEmbedRequest: {"input": "Hi"},
    OllamaEmbeddingRequest: {"prompt": "Hi"},
}  # fmt: skip


def chat(*messages, **fields):
    return ChatRequest, {"messages": [USER, *messages], **fields}


def responses(*items, **fields):
    return ResponseRequest, {"input": [USER, *items], **fields}


def claude(*blocks, **fields):
    """A body of messages with a call, whose result is among `blocks`."""
    called = [{**USER}, {"role": "assistant", "content": [CLAUDE_CALL]}]
    return MessageRequest, {"messages": [*called, {"role": "user", "content": blocks}], **fields}


def ollama(*messages, **fields):
    return OllamaChatRequest, {"messages": [USER, *messages], **fields}


TAKEN = [
    (chat(reasoning_effort="high"), "reasoning_effort"),
    (chat(verbosity="low"), "verbosity"),
    (chat(service_tier="priority"), "service_tier"),
    (chat(store=True, metadata={"a": "b"}), "store, metadata"),
    (chat(prediction={"type": "content", "content": "x"}), "prediction"),
    (chat(prompt_cache_retention="24h", prompt_cache_key="k"), "prompt_cache_retention, prompt_cache_key"),
    (chat(user="me", safety_identifier="me"), "user, safety_identifier"),
    (chat(client_metadata={"a": "b"}), "client_metadata"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(stream_options={"include_obfuscation": True}), "stream_options.include_obfuscation"),
    (chat(stream_options={"include_usage": True}), ""),
    (chat(keep_alive=5, unheard_of=[1]), "keep_alive, unheard_of"),
    (chat({**USER, "name": "Ann"}), "messages[].name"),
    (chat({**USER, "content": [{**TEXT, "cache_control": CACHE}]}), "messages[].content[].cache_control"),
    (chat({"role": "system", "content": "Be brief", "name": "x"}), "messages[].name"),
    (chat({"role": "developer", "content": "Be brief"}, {**USER, "unheard_of": 1}), ""),
    (chat(tools=[{**CHAT_TOOL, "cache_control": CACHE}]), "tools[].cache_control"),
    (chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools[custom]"),
    (chat(tools=[], functions=[], function_call="none", audio=None, modalities=["text"]), ""),
    (chat(tool_choice="auto", parallel_tool_calls=True, logprobs=False, top_logprobs=0), ""),
    (chat(max_tokens=1, max_completion_tokens=1, top_k=-1, seed=-1, stop=None), ""),
    (chat(stop="", guided_regex="", guided_choice=[], logit_bias={}, n=None), ""),
    (chat(response_format={}, structured_outputs={}, tool_choice="", logprobs=0), ""),
    (chat({"role": "system", "content": None}, {**USER, "content": None}), ""),
    (chat({**CHAT_ANSWER, "tool_calls": [{**CHAT_CALL, "function": {"name": "look", "arguments": None}}]},
     CHAT_RESULT), ""),
    ((CompletionRequest, {"logprobs": False, "structured_outputs": {}}), ""),
    (chat(min_tokens=0, ignore_eos=False, stop_token_ids=[], repeat_penalty=1.0), ""),
    (chat({**CHAT_ANSWER, "tool_calls": [{**CHAT_CALL, "index": 0, "unheard_of": {}}], "refusal": None,
     "audio": None, "function_call": None, "annotations": [{"type": "url_citation"}],
     "reasoning_content": "Hm.", "thinking_blocks": [], "provider_specific_fields": {"refusal": None}},
     {**CHAT_RESULT, "name": "look"}), ""),
    ((CompletionRequest, {"suffix": "", "best_of": None, "store": True, "top_k": -1}), "store"),
    (responses(client_metadata={"a": "b"}), "client_metadata"),
    (responses(reasoning={"effort": "high", "summary": "auto"}), "reasoning.effort, reasoning.summary"),
    (responses(reasoning={"effort": None, "summary": None}, text={"verbosity": "medium"}), ""),
    (responses(text={"verbosity": "low"}, service_tier="flex"), "text.verbosity, service_tier"),
    (responses(truncation="auto", max_tool_calls=3), "truncation, max_tool_calls"),
    (responses(truncation="disabled", context_management=[], n=1), ""),
    (responses(context_management=[{"type": "compaction"}]), "context_management"),
    (responses(prompt_cache_retention="24h", stream_options={"include_obfuscation": True}),
     "prompt_cache_retention, stream_options.include_obfuscation"),
    (responses(max_output_tokens=-1, instructions="", previous_response_id=""), ""),
    (responses(tools=[{**TOOL, "defer_loading": True, "output_schema": {}}]), "tools[].defer_loading"),
    (responses(tools=[{"type": "web_search", "external_web_access": True}, {"type": "namespace",
     "name": "mcp", "tools": [TOOL]}, {"type": "custom", "name": "apply_patch",
     "format": {"type": "grammar"}}, {"type": "local_shell"}, {"type": "computer_use_preview"}, TOOL]),
     "tools[web_search], tools[namespace], tools[custom], tools[local_shell], tools[computer_use_preview]"),
    (responses({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, USER),
     "input[reasoning]"),
    (responses({"role": "developer", "content": "Be brief"}, {**USER, "unheard_of": 1}), ""),
    (responses({**USER, "content": None}, {**CALL, "arguments": None}, RESULT, tool_choice={}), ""),
    (responses({"role": "assistant", "id": "msg_1", "status": "completed", "phase": "commentary",
     "content": [{**OUTPUT_TEXT, "annotations": [{}], "logprobs": []}]}, {**CALL, "id": "fc_1",
     "status": "completed", "namespace": None}, {**RESULT, "output": [INPUT_TEXT],
     "internal_chat_message_metadata_passthrough": {}}), ""),
    (claude(CLAUDE_RESULT, thinking={"type": "adaptive"}), "thinking"),
    (claude(CLAUDE_RESULT, thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
    (claude(CLAUDE_RESULT, thinking={"type": "disabled"}, service_tier="auto", mcp_servers=[]), ""),
    (claude(CLAUDE_RESULT, output_config={"effort": "high"}), "output_config.effort"),
    (claude(CLAUDE_RESULT, context_management={"edits": [{"type": "clear_thinking_20251015"}]}),
     "context_management"),
    (claude(CLAUDE_RESULT, service_tier="standard", inference_geo="us"), "service_tier, inference_geo"),
    (claude(CLAUDE_RESULT, metadata={"user_id": "me"}, speed="fast"), "metadata, speed"),
    (claude(CLAUDE_RESULT, mcp_servers=[{"type": "url"}], container="c"), "mcp_servers, container"),
    (claude({**TEXT, "cache_control": CACHE}, CLAUDE_RESULT, TEXT), "messages[].content[].cache_control"),
    (claude(CLAUDE_RESULT, system=[{**TEXT, "cache_control": CACHE}]), "system[].cache_control"),
    (claude({**CLAUDE_RESULT, "content": [{"type": "tool_reference", "tool_name": "look"}]}),
     "messages[].content[].content[tool_reference]"),
    (claude(CLAUDE_RESULT, tools=[{**CLAUDE_TOOL, "defer_loading": True, "input_examples": [{}]},
     {"type": "web_search_20260318", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
     tool_choice={"type": "auto"}, top_k=-1),
     "tools[].defer_loading, tools[].input_examples, tools[web_search_20260318], tools[bash_20250124]"),
    ((MessageRequest, {"messages": [{"role": "system", "content": "Be kind"}, USER, {"role": "assistant",
     "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking",
     "data": "x"}, {**TEXT, "citations": [{}]}]}, {"role": "system", "content": [TEXT]}]}),
     "messages[].content[thinking], messages[].content[redacted_thinking]"),
    ((MessageRequest, {"messages": [USER, {"role": "assistant", "content": [{"type": "server_tool_use",
     "id": "s", "name": "web_search", "input": {}}, {"type": "web_search_tool_result", "tool_use_id": "s",
     "content": []}, TEXT]}, USER]}),
     "messages[].content[server_tool_use], messages[].content[web_search_tool_result]"),
    (ollama(keep_alive="5m", think=True, truncate=True, shift=True), "think, truncate, shift"),
    (ollama(keep_alive=None, think=False, format="", tools=[], logprobs=False, top_logprobs=0), ""),
    (ollama(think="high", options={"num_predict": 1, "num_ctx": 4096, "num_gpu": -1, "seed": -1,
     "mirostat": 0, "tfs_z": 1.0}),
     "options.num_ctx, options.num_gpu, options.mirostat, options.tfs_z, think"),
    (ollama(options={"num_keep": 4, "typical_p": 1.0, "repeat_penalty": 1.0, "x": 1, "num_predict": 1}),
     "options.num_keep"),
    (ollama({**OLLAMA_ANSWER, "thinking": "Hm.", "images": None, "unheard_of": 1}, OLLAMA_RESULT), ""),
    (ollama({"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"index": 0,
     "name": "look", "arguments": {}}}]}, {"role": "tool", "content": "a tree", "tool_call_id": "c",
     "name": "look"}), ""),
    (ollama(tools=[CHAT_TOOL, {"type": "web_search"}], unheard_of=1), "tools[web_search], unheard_of"),
    ((OllamaGenerateRequest, {"system": "", "template": "", "context": [], "raw": False, "suffix": "",
     "images": []}), ""),
    ((OllamaGenerateRequest, {"keep_alive": "-1", "think": "low"}), "think"),
]  # fmt: skip
"""Requests of real clients, many from their issues, and the ignored fields in the header."""


@pytest.fixture(scope="module")
def http():
    with running_server(kv="float") as server, server.http() as client:
        yield client


@pytest.fixture(scope="module")
def strict():
    with running_server(strict=True) as server, server.http() as client:
        yield client


def body(kind, fields):
    return {"model": "afm-nano", **LEAST[kind], **fields}


@each("asked, ignored", TAKEN)
def test_hints_and_other_providers_tools_are_named(http, asked, ignored):
    kind, fields = asked
    taken = http.post(PATHS[kind], json=body(kind, fields))
    assert taken.status_code == 200, taken.text
    assert taken.headers.get("x-afm-ignored", "") == ignored
    streamed = http.post(PATHS[kind], json={**body(kind, fields), "stream": True})
    assert streamed.headers.get("x-afm-ignored", "") == ignored


def test_tokens_of_a_whole_request_are_counted(http):
    sampling = {"temperature": 0.5, "top_p": 0.9, "stream": False}
    for path, (kind, fields), named in (
        ("/v1/responses/input_tokens", responses(store=False, **sampling), "max_output_tokens"),
        ("/v1/messages/count_tokens", claude(CLAUDE_RESULT, **sampling), "max_tokens"),
    ):
        counted = http.post(path, json=body(kind, fields))
        assert counted.json()["input_tokens"] > 20, counted.text
        assert {named, "temperature"} <= set(counted.headers["x-afm-ignored"].split(", "))


def test_ignored_fields_are_logged(http, caplog):
    with caplog.at_level("INFO", "afm_mlx.server"):
        http.post("/v1/chat/completions", json=body(*chat(verbosity="low", audio=None)))
    (line,) = (record.message for record in caplog.records if "effect" in record.message)
    assert line == "/v1/chat/completions: of no effect here: verbosity"


STRICT = [
    (ollama(shift=True), "shift"),
    (ollama(options={"num_ctx": 4096}), "options.num_ctx"),
    (chat(reasoning_effort="high"), "reasoning_effort"),
    (chat(client_metadata={}), "client_metadata"),
    (chat({"role": "system", "content": "Be brief"}), "messages[1]"),
    (chat({**USER, "unheard_of": None}), "messages[1].unheard_of"),
    (chat(tools=[{"type": "custom"}]), "tools[0].type"),
    (responses({"type": "reasoning", "summary": []}), "input[1].type"),
    (responses({"role": "system", "content": "Be brief"}), "input[1]"),
    (claude(CLAUDE_RESULT, tools=[{"type": "bash_20250124"}]), "tools[0].type"),
]  # fmt: skip


@each("asked, place", STRICT)
def test_a_strict_server_refuses_ignored_fields(strict, asked, place):
    kind, fields = asked
    refused = strict.post(PATHS[kind], json=body(kind, fields))
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    if isinstance(error, str):  # Ollama's form
        error = {"message": error}
    assert place in (error.get("param"), error["message"].partition(" ")[0].rstrip(":")), error


@each(
    "asked",
    [
        chat(user="me", safety_identifier="me", prompt_cache_key="k", verbosity="medium", tools=[]),
        chat({**CHAT_ANSWER, "refusal": None, "annotations": []}, {**CHAT_RESULT, "name": "look"},
         tools=[{**CHAT_TOOL, "function": {"name": "look", "strict": True}}]),
        claude({**CLAUDE_RESULT, "cache_control": CACHE}, cache_control=CACHE, metadata={"user_id": "me"},
         tools=[{**CLAUDE_TOOL, "cache_control": CACHE, "eager_input_streaming": True}]),
    ],
)  # fmt: skip
def test_a_strict_server_takes_user_ids_and_its_own_answers(strict, asked):
    kind, fields = asked
    taken = strict.post(PATHS[kind], json=body(kind, fields))
    assert taken.status_code == 200, taken.text


# -- the table itself

IMAGE = {"type": "image_url", "image_url": {"url": "data:;base64,"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:;base64,"}
CLAUDE_IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}

BASES: dict[Any, list[dict[str, Any]]] = {
    ChatRequest: [{"messages": [{"role": "user", "content": [TEXT]}, CHAT_ANSWER], "tools": [CHAT_TOOL],
     "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT_TOOL]}},
     "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}, "stream_options": {},
     "structured_outputs": {}}, {"messages": [CHAT_RESULT]}, {"messages": [{"role": "assistant",
     "content": [TEXT]}]}, {"messages": [{"role": "user", "content": [IMAGE]}]},
     {"messages": [{**CHAT_RESULT, "content": [IMAGE]}]}],
    CompletionRequest: [{"prompt": "Hi", "stream_options": {}, "structured_outputs": {}}],
    ResponseRequest: [{"input": [{"role": "user", "content": [INPUT_TEXT]}], "tools": [TOOL],
     "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}, "reasoning": {},
     "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "stream_options": {}},
     {"input": [CALL]}, {"input": [{**RESULT, "output": [OUTPUT_TEXT]}]}, {"input": [{**RESULT,
     "output": [INPUT_TEXT]}]}, {"input": [{"role": "user", "content": [OUTPUT_TEXT]}]},
     {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, {"input": [{**RESULT,
     "output": [INPUT_IMAGE]}]}],
    MessageRequest: [{"max_tokens": 1, "messages": [{"role": "user", "content": [TEXT]}], "system": [TEXT],
     "tools": [CLAUDE_TOOL], "output_config": {}}, {"max_tokens": 1, "messages": [{"role": "assistant",
     "content": [CLAUDE_CALL]}]}, {"max_tokens": 1, "messages": [{"role": "user",
     "content": [{**CLAUDE_RESULT, "content": [TEXT]}]}]}, {"max_tokens": 1, "messages": [{"role": "user",
     "content": [CLAUDE_IMAGE]}]}, {"max_tokens": 1, "messages": [{"role": "user",
     "content": [{**CLAUDE_RESULT, "content": [CLAUDE_IMAGE]}]}]}],
    OllamaChatRequest: [{"messages": [OLLAMA_ANSWER], "tools": [CHAT_TOOL], "options": {}},
     {"messages": [OLLAMA_RESULT]}],
    OllamaGenerateRequest: [{"prompt": "Hi", "options": {}}],
    **{kind: [LEAST[kind]] for kind in (EmbeddingRequest, RerankRequest, OllamaEmbedRequest,
     OllamaEmbeddingRequest)},
}  # fmt: skip
"""Bodies that together have every object with ignored or refused fields."""


def with_field(base, path, value):
    """Return a body with a field at a path, or None if the body lacks the field's object."""
    made = json.loads(json.dumps({"model": "m", **base}))
    *objects, name = path.replace("[]", ".[]").split(".")
    place = made
    for step in objects:
        if step == "[]":
            if not isinstance(place, list):
                return None
            place = place[-1]
        elif not isinstance(place, dict) or step not in place:
            return None
        else:
            place = place[step]
    if name == "[]":
        if not isinstance(place, list):
            return None
        place.append(value)
    elif not isinstance(place, dict):
        return None
    else:
        place[name] = value
    return made


def bodies_with(kind, path, value):
    made = (with_field(base, path, value) for base in BASES[kind])
    return [one for one in made if one is not None]


def plain(place):
    return re.sub(r"\[\d+\]", "[]", place)


def outcome(asked, kind, is_strict=False):
    """Return the fields that a reader names, or the field that it refuses, for a model that sees."""
    reader = Reader(is_strict, sees=lambda model: True)
    try:
        reader.read(asked, kind)
    except ApiError as error:
        return plain(error.param)
    return list(reader.ignored)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_field_follows_its_rule(kind):
    seen = set()
    for path, rule in all_fields(kind):
        seen.add(type(rule))
        if isinstance(rule, Kinds):
            for name in rule.ignored or ("unheard_of",):
                reported = [outcome(b, kind) for b in bodies_with(kind, path, {"type": name})]
                assert [f"{path[:-2]}[{name}]"] in reported, path
        elif not isinstance(rule, Honoured):
            reported = [outcome(b, kind) for b in bodies_with(kind, path, "unheard_of")]
            is_named = isinstance(rule, Ignored) and rule.is_named
            expected = path if isinstance(rule, Refused) else [path] if is_named else []
            assert expected in reported, (path, reported)
            for off in (None, *rule.off):
                assert [] in [outcome(b, kind) for b in bodies_with(kind, path, off)], (path, off)
            reported = [outcome(b, kind, True) for b in bodies_with(kind, path, "unheard_of")]
            takes = isinstance(rule, Ignored) and rule.if_strict
            assert (([path] if is_named else []) if takes else path) in reported, (path, reported)
    assert {Honoured, Ignored} <= seen


def test_other_apis_fields_are_refused_unless_they_are_off():
    for kind in REQUESTS:
        own = set(rules_of(kind))
        for name, off in known_elsewhere().items():
            if name in own:
                continue
            asked = {"model": "m", **LEAST[kind]}
            with pytest.raises(ApiError) as refused:
                Reader(known=known_elsewhere()).read({**asked, name: "unheard_of"}, kind)
            assert refused.value.param == name
            for value in (None, *off):
                Reader(known=known_elsewhere()).read({**asked, name: value}, kind)
    honoured = {
        name
        for kind in REQUESTS
        for name, field in rules_of(kind).items()
        if isinstance(field.rule, Honoured)
    }
    assert not OTHER_SERVERS.keys() & honoured


@pytest.mark.slow
def test_every_field_of_the_official_clients_is_in_the_table():
    """Among the slow tests, because a client's release may make it fail: its new field needs a rule."""
    for params, kind in (
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (completion_params.CompletionCreateParamsBase, CompletionRequest),
        (response_params.ResponseCreateParamsBase, ResponseRequest),
        (message_params.MessageCreateParamsBase, MessageRequest),
        (beta_params.MessageCreateParamsBase, MessageRequest),
        (ollama_types.ChatRequest, OllamaChatRequest),
        (ollama_types.GenerateRequest, OllamaGenerateRequest),
        (embedding_params.EmbeddingCreateParams, EmbeddingRequest),
        (ollama_types.EmbedRequest, OllamaEmbedRequest),
        (ollama_types.EmbeddingsRequest, OllamaEmbeddingRequest),
        (ollama_types.Options, OllamaOptions),
        (ollama_types.Message, OllamaMessage),
    ):
        sent = get_type_hints(params).keys() - {"betas"}  # a header
        assert sent <= set(rules_of(kind)), params


def test_names_in_the_header_are_plain_and_few():
    reader = Reader()
    fields = {f"field{i}": 1 for i in range(99)}
    reader.read({"x\r\nset-cookie: a": 1, "é": 1, **fields, **body(ChatRequest, {})}, ChatRequest)
    assert list(reader.ignored)[:2] == ["(other)", "field0"]
    assert len(reader.ignored) == MAX_IGNORED
