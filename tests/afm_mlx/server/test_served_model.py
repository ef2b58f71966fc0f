"""Model ids: models of mlx-lm, and adapters."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from afm_mlx.adapters.lora import add_lora, save_lora
from afm_mlx.adapters.task_mask import read_mask, write_mask
from afm_mlx.errors import RequestError
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.served_model import ModelSource, ServedModel
from tests.tools.adapters import randomize_lora
from tests.tools.engines import naive_greedy
from tests.tools.masks import draw_mask
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


def test_adapters_of_a_zoo_model_are_model_ids(tmp_path, rng):
    """Two in one batch with the base, and again after a switch: the texts that stock mlx-lm gives with each."""
    import mlx_lm

    folder, base = tmp_path / "tiny", zoo_model("qwen3", 64, 1)
    write_zoo_folder(folder, "qwen3", base, word_tokenizer_json(64))
    wanted, prompt = {"tiny": base}, [5, 6, 7, 8]
    for name in "ab":
        trained = add_lora(zoo_model("qwen3", 64, 1), 3, 0.9, seed=ord(name))
        randomize_lora(trained, rng)
        save_lora(trained, path := folder / "adapters" / name)
        wanted[f"tiny:{name}"] = mlx_lm.load(str(folder), adapter_path=str(path))[0]
    texts = {each: naive_greedy(model, prompt, 12) for each, model in wanted.items()}
    # Up to the end token.
    texts = {each: [*tokens, 1][: [*tokens, 1].index(1)] for each, tokens in texts.items()}
    with running_server(source=folder) as server, ThreadPoolExecutor(3) as threads:
        client = server.openai()
        assert {model.id for model in client.models.list()} == wanted.keys()

        def complete(model):
            answer = client.completions.create(
                model=model, prompt=prompt, max_tokens=12, temperature=0
            )
            return [int(word[1:]) for word in answer.choices[0].text.split()]

        for models in (["tiny:a", "tiny", "tiny:b"], ["tiny:b", "tiny:a", "tiny:a"]):
            for model, tokens in zip(models, threads.map(complete, models), strict=True):
                assert tokens == texts[model]
    assert len(set(map(tuple, texts.values()))) == 3


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
        if family == "qwen3":  # of which mlx-lm's detokenizer drops one
            four = server.served.tokenizer.convert_tokens_to_ids("ĠĠĠĠ")
            spaces = client.completions.create(
                model="model", prompt="a", logit_bias={str(four): 100}, temperature=0, max_tokens=3
            )
            assert spaces.choices[0].text == " " * 12


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
            assert "in model refuses these messages: Conversation roles" in error["message"]
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
        ids = [
            "mine",
            *(f"mine:{name}" for name in ("redact", "search", "todo", "triage", "private")),
        ]
        assert sorted(served.model_ids) == sorted(ids)
        models = ModelRegistry.of(served)
        found = [models.find(each)[1] for each in ("mine", "mine:private")]
        assert found == ["todo", "private"]
    finally:
        served.close()


def test_the_models_own_id_can_have_a_mask(tmp_path):
    """Alone it has its folder's name; with an adapter, the two have one name."""
    source = ModelSource.of(name="mine")
    mask = tmp_path / "half"
    model, _ = load(source.folder)
    write_mask(mask, draw_mask(model, np.random.default_rng(0)))
    for options, name, rank in (
        ({"mask": mask}, "half", 0),
        ({"mask": mask, "adapter_path": ADAPTERS / "todo"}, "todo+half", 16),
    ):
        served = ServedModel.load(name="mine", **options)
        try:
            assert f"mine:{name}" in served.model_ids
            models = ModelRegistry.of(served)
            assert models.find("mine")[1] == models.find(f"mine:{name}")[1] == name
            resident = served.pool.load(name)
            assert resident.rank == rank
            assert resident.mask.fingerprint == read_mask(mask).fingerprint
        finally:
            served.close()
    other = tmp_path / "other" / "half"
    write_mask(other, draw_mask(model, np.random.default_rng(1)))
    with pytest.raises(RequestError, match="would have the name half"):
        ModelSource.of(mask=mask, adapters={"half": other})


def test_weights_are_freed_also_where_adapters_fail_to_close(monkeypatch):
    served = ServedModel.load(name="mine", adapters={"private": ADAPTERS / "redact"})
    monkeypatch.setattr(served.pool, "close", lambda: {}["pool"])
    with pytest.raises(KeyError, match="pool"):
        served.close()
    assert not hasattr(served, "model")
