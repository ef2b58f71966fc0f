"""Model ids: models of mlx-lm, and adapters."""

import pytest

from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.served_model import ServedModel
from tests.tools.server import running_server
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model
from tests.tools.zoo_chats import write_family_folder

ADAPTERS = resolve_model("afm-nano") / "adapters"


def test_a_model_of_mlx_lms_zoo_continues_texts(tmp_path):
    folder = tmp_path / "tiny-llama"
    write_zoo_folder(folder, "llama", zoo_model("llama", 64, 1), word_tokenizer_json(64))
    with running_server(source=folder) as server, server.http() as http:

        def complete(prompt, **fields):
            body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 5, **fields}
            return http.post("/v1/completions", json=body).json()

        first = complete("w5 w6 w7", logprobs=1)
        (choice,) = first["choices"]
        # This tokenizer decodes spaces between words that its pieces don't have.
        assert choice["logprobs"]["tokens"] == choice["text"].split()
        again = complete([5, 6, 7])
        assert again["choices"][0]["text"] == choice["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        chat = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}]}
        refused = http.post("/v1/chat/completions", json=chat)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_bytes_of_zoo_tokens_add_up_to_the_text(tmp_path, family):
    """Of byte-level tokenizers, and of pieces, most of which are parts of characters here."""
    folder = write_family_folder(tmp_path / "model", family)
    with running_server(source=folder) as server:
        client = server.openai()
        for seed in range(4):
            choice = client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": "hi"}],
                temperature=1.5,
                seed=seed,
                max_tokens=40,
                logprobs=True,
            ).choices[0]
            tokens = choice.logprobs.content
            read = b"".join(bytes(token.bytes) for token in tokens)
            assert read.decode("utf-8", "replace") == choice.message.content
            assert any(token.bytes and max(token.bytes) > 127 for token in tokens)


def test_a_template_that_refuses_is_an_error_of_the_messages(tmp_path):
    folder = write_family_folder(tmp_path / "model", "gemma3")
    twice = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    with running_server(source=folder) as server, server.http() as http:
        for path, body in {
            "/v1/chat/completions": {"messages": twice[1:]},
            "/v1/responses": {"input": twice[1:]},
            "/v1/messages": {"messages": twice[1:], "max_tokens": 5},
        }.items():
            refused = http.post(path, json={"model": "model", **body})
            assert refused.status_code == 400, path
            error = refused.json()["error"]
            assert "can't write this chat: TemplateError: Conversation roles" in error["message"]
            assert str(tmp_path) not in error["message"]
            field = "input" if path == "/v1/responses" else "messages"
            assert error.get("param", field) == field
        counted = http.post(
            "/v1/messages/count_tokens", json={"model": "model", "messages": twice[1:]}
        )
        assert counted.status_code == 400


def test_the_models_own_id_can_have_an_adapter():
    served = ServedModel.load(
        name="mine", adapter_path=ADAPTERS / "todo", adapters={"private": ADAPTERS / "redact"}
    )
    try:
        ids = ["mine", "mine:redact", "mine:todo", "mine:triage", "mine:private"]
        assert sorted(served.model_ids) == sorted(ids)
        models = ModelRegistry.of(served)
        found = [models.find(each)[1] for each in ("mine", "mine:private")]
        assert found == ["todo", "private"]
    finally:
        served.close()
