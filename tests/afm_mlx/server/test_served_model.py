"""Model ids: models of mlx-lm, and adapters."""

from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server.served_model import ServedModel
from tests.tools.server import running_server
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

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


def test_the_models_own_id_can_have_an_adapter():
    served = ServedModel.load(
        name="mine", adapter_path=ADAPTERS / "todo", adapters={"private": ADAPTERS / "redact"}
    )
    try:
        ids = ["mine", "mine:redact", "mine:todo", "mine:triage", "mine:private"]
        assert sorted(served.model_ids) == sorted(ids)
        assert [served.adapter_of(each) for each in ("mine", "mine:private")] == ["todo", "private"]
    finally:
        served.close()
