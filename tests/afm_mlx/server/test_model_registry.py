"""Several models of one server: loaded on demand, evicted for room and when idle, and no request lost."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest

from afm_mlx.errors import RequestError
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server import model_registry
from afm_mlx.server.hosted_model import HostedModel
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.served_model import ModelSource
from afm_mlx.server.server_options import ServerOptions
from tests.tools.server import several_models, until
from tests.tools.zoo_chats import write_family_folder

ADAPTERS = resolve_model("afm-nano") / "adapters"
HELLO = [{"role": "user", "content": "hello"}]
PREFIXES = 1 << 20  # bytes of the prefix cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models of mlx-lm with different tokenizers, templates and answers."""
    root = tmp_path_factory.mktemp("models")
    a = write_family_folder(root / "a", "qwen3", max_position_embeddings=4096)
    b = write_family_folder(root / "b", "llama3", "llama", seed=1, max_position_embeddings=4096)
    return a, b


def room_for(*folders, spare=0):
    """Memory for the largest one of some models and the prefix cache."""
    sizes = [ModelSource.of(folder).memory_bytes for folder in folders]
    return {"memory": max(sizes) + PREFIXES + spare, "prompt_cache_bytes": PREFIXES}


def ask(server, model, tokens=6, **fields):
    answer = server.client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=tokens, logprobs=True, **fields
    )
    return [each.token for each in answer.choices[0].logprobs.content]


@pytest.fixture
def loads(monkeypatch):
    """A gate that loads wait at while it is closed, and a count of the loads at it."""
    gate = Gate()
    load = ModelSource.load

    def held(source, *args, **kwargs):
        gate.waiting += 1
        assert gate.opened.wait(60)
        return load(source, *args, **kwargs)

    monkeypatch.setattr(ModelSource, "load", held)
    yield gate
    gate.opened.set()


class Gate:
    def __init__(self):
        self.opened, self.waiting = threading.Event(), 0


def test_models_are_loaded_on_demand_and_answer_as_they_do_alone(folders):
    alone = {}
    for folder in folders:
        with several_models(folder, loads_first=True) as server:
            alone[folder.name] = ask(server, folder.name)
    assert alone["a"] != alone["b"]
    with several_models(*folders, "afm-nano", loads_first=True) as server:
        assert server.states() == {"a": "loaded", "b": "unloaded", "afm-nano": "unloaded"}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: ask(server, "ab"[i % 2]), range(8)))
        assert answers == [alone["ab"[i % 2]] for i in range(8)]
        assert ask(server, "afm-nano:todo")
        assert set(server.states().values()) == {"loaded"}
        for model in ("a", "b", "afm-nano"):
            assert server.count("model_loads_total", model) == 1
            assert server.count("request_success_total", model) == (1 if model == "afm-nano" else 4)


def test_every_api_waits_for_its_model(folders):
    body = {"model": "b", "max_tokens": 3}
    for path, more in {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": ["hello", "again"]},
        "/v1/responses": {"input": "hello", "max_output_tokens": 3},
        "/v1/messages": {"messages": HELLO},
        "/v1/messages/count_tokens": {"messages": HELLO},
        "/v1/responses/input_tokens": {"input": "hello"},
        "/tokenize": {"prompt": "hello"},
        "/detokenize": {"tokens": [1, 2]},
    }.items():
        asked = {**body, **more}
        if "responses" in path or "token" in path:
            del asked["max_tokens"]
        with several_models(*folders) as server, server.http() as http:
            for stream in (False, True) if "max_tokens" in asked or "output" in str(asked) else [0]:
                given = {**asked, "stream": True} if stream else asked
                reply = http.post(path, json=given)
                assert reply.status_code == 200, (path, reply.text)
            assert server.states() == {"a": "unloaded", "b": "loaded"}
            until(lambda: not any(model.users for model in server.models.models))


def test_the_list_tells_states_and_sizes(folders, loads):
    a, b = folders
    with several_models(a, b, "afm-nano") as server, server.http() as http:

        def listed():
            return {each["id"]: each for each in http.get("/v1/models").json()["data"]}

        assert http.get("/health").json() == {"status": "ok", "models": {"unloaded": 3}}
        before = listed()
        assert list(before) == ["a", "b", "afm-nano", *sorted(set(before) - {"a", "b", "afm-nano"})]
        assert before["afm-nano:todo"]["parent"] == "afm-nano"
        size = (a / "model.safetensors").stat().st_size
        described = {"state": "unloaded", "disk_bytes": size, "memory_bytes": 0}
        assert described.items() <= before["a"].items()
        assert before["a"]["max_model_len"] == 4096
        assert before["afm-nano"]["max_model_len"] == 1024
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, server, "a")
            until(lambda: loads.waiting == 1)
            assert listed()["a"]["state"] == "loading"
            loads.opened.set()
            asked.result(60)
        after = listed()["a"]
        assert after["state"] == "loaded"
        estimate = server.models.models[0].source.memory_bytes
        assert after["memory_bytes"] == pytest.approx(estimate, rel=0.1)
        assert after | {"state": "unloaded", "memory_bytes": 0} == before["a"]
        ready = http.get("/ready").json()
        assert ready == {
            "status": "ready",
            "model": "a",
            "models": {"loaded": 1, "unloaded": 2},
        }
        said = http.get("/metrics").text
        assert 'afm_mlx:model_loaded{model_name="a"} 1.0' in said
        assert 'afm_mlx:model_loaded{model_name="b"} 0.0' in said
        assert said.count("# TYPE afm_mlx:model_loaded") == 1
        assert http.get("/v1/models/b").json() == before["b"]
        with pytest.raises(openai.NotFoundError, match="There is no model 'c'"):
            ask(server, "c")


def test_an_answer_streams_while_another_model_is_loaded(folders, loads):
    loads.opened.set()
    with several_models(*folders, loads_first=True) as server, ThreadPoolExecutor(1) as pool:
        stream = server.client.chat.completions.create(
            model="a", messages=HELLO, max_tokens=40, stream=True, logit_bias={"0": -100}
        )
        next(stream)
        loads.opened.clear()
        asked = pool.submit(ask, server, "b")
        until(lambda: server.states()["b"] == "loading")
        assert len(list(stream)) > 5  # it ends
        assert not asked.done()
        loads.opened.set()
        assert asked.result(60)


def test_a_model_makes_room_for_another_and_its_weights_are_freed(folders):
    with several_models(*folders, loads_first=True, **room_for(*folders)) as server:
        first = ask(server, "a")
        model = weakref.ref(server.models.models[0].served.model)
        served = weakref.ref(server.models.models[0].served)
        server.served = None
        assert ask(server, "b")
        assert server.states() == {"a": "unloaded", "b": "loaded"}
        assert model() is None
        assert ask(server, "a") == first
        assert server.states() == {"a": "loaded", "b": "unloaded"}
        until(lambda: served() is None)
        assert server.count("model_loads_total", "a") == 2
        assert server.count("model_evictions_total", "a") == 1


def test_the_least_recently_used_model_goes(folders):
    size = ModelSource.of("afm-nano").memory_bytes
    both = sum(ModelSource.of(folder).memory_bytes for folder in folders)
    room = max(size + max(ModelSource.of(f).memory_bytes for f in folders), both)
    with several_models(
        *folders, "afm-nano", memory=room + PREFIXES, prompt_cache_bytes=PREFIXES
    ) as server:
        for model in "aba":
            ask(server, model)
        ask(server, "afm-nano")
        assert server.states() == {"a": "loaded", "b": "unloaded", "afm-nano": "loaded"}


def test_a_model_in_use_is_not_evicted(folders):
    with several_models(*folders, loads_first=True, **room_for(*folders)) as server:
        with ThreadPoolExecutor(2) as pool:
            stream = server.client.chat.completions.create(
                model="a", messages=HELLO, max_tokens=300, stream=True, n=2
            )
            next(stream)
            asked = pool.submit(ask, server, "b")
            until(lambda: server.models.resources.admission.active == 3)
            reasons = [c.choices[0].finish_reason for c in stream if c.choices]
            assert len([reason for reason in reasons if reason]) == 2
            assert asked.result(60)
        assert server.count("request_success_total", "a") == 2


def test_an_idle_model_leaves_memory_and_comes_back(folders):
    with several_models(*folders, keep_alive=0.3) as server:
        first = ask(server, "a")
        until(lambda: server.states()["a"] == "unloaded")
        stream = server.client.chat.completions.create(
            model="a", messages=HELLO, max_tokens=4000, stream=True
        )
        next(stream)
        time.sleep(0.5)  # longer than it is kept when idle
        assert server.models.models[0].users == 1
        assert server.count("model_evictions_total", "a") == 1
        stream.close()
        assert ask(server, "a") == first


def test_keys_and_values_of_long_answers_evict_idle_models(folders):
    both = sum(ModelSource.of(folder).memory_bytes for folder in folders)
    memory = both + PREFIXES + 10_000
    with several_models(*folders, memory=memory, prompt_cache_bytes=PREFIXES) as server:
        ask(server, "b")
        stream = server.client.chat.completions.create(
            model="a", messages=HELLO, max_tokens=4000, stream=True
        )
        next(stream)
        assert server.states()["a"] == "loaded"
        until(lambda: server.states() == {"a": "loaded", "b": "unloaded"})
        stream.close()


def test_a_load_that_fails_is_one_error_for_all_that_wait(folders, tmp_path, loads, monkeypatch):
    waiting = []

    async def acquire(self, *args, theirs=ModelRegistry.acquire):
        waiting.append(args)  # what follows up to the wait is in the same turn of the event loop
        return await theirs(self, *args)

    monkeypatch.setattr(ModelRegistry, "acquire", acquire)
    broken = write_family_folder(tmp_path / "broken", "qwen3", seed=3)
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with several_models(folders[0], broken) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, "broken") for _ in range(3)]
        until(lambda: len(waiting) == 3)
        loads.opened.set()
        for each in asked:
            with pytest.raises(openai.InternalServerError) as caught:
                each.result(60)
            assert caught.value.code == "model_load_failed"
            assert "could not be loaded: " in caught.value.message
            assert str(tmp_path) not in caught.value.message
        assert loads.waiting == 1
        assert server.count("model_load_failures_total", "broken") == 1
        assert server.count("request_errors_total", "broken") == 3
        assert ask(server, "a")
        assert server.states() == {"a": "loaded", "broken": "unloaded"}
        weights.write_bytes(content)
        assert ask(server, "broken")


def test_an_unexpected_error_of_a_load_is_in_the_log_only(folders, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise MemoryError("no room in /secret")

    monkeypatch.setattr(ModelSource, "load", fail)
    with several_models(*folders) as server:
        with pytest.raises(openai.InternalServerError, match="log says why") as caught:
            ask(server, "a")
        assert "secret" not in caught.value.message
        assert "secret" in caplog.text


def test_a_model_that_never_fits_is_refused_and_others_are_not(folders):
    a, _ = folders
    with several_models(a, "afm-nano", **room_for(a)) as server:
        with pytest.raises(openai.InternalServerError, match="--memory leaves") as caught:
            ask(server, "afm-nano")
        assert caught.value.code == "model_load_failed"
        assert ask(server, "a")
    options = ServerOptions(memory=PREFIXES, prompt_cache_bytes=PREFIXES)
    with pytest.raises(RequestError, match="leaves none to models"):
        ModelRegistry([HostedModel(ModelSource.of(a))], options)
    with pytest.raises(RequestError, match="Several models would have the id a"):
        ModelRegistry([HostedModel(ModelSource.of(a))] * 2, ServerOptions())
    sources = ModelSource.of("afm-nano"), ModelSource.of(a, name="afm-nano:todo")
    with pytest.raises(RequestError, match="Several models would have the id afm-nano:todo"):
        ModelRegistry([HostedModel(each) for each in sources], ServerOptions())


@pytest.mark.parametrize("finishes", [True, False], ids=["before the end", "after the end"])
def test_the_server_stops_in_the_middle_of_a_load(folders, loads, finishes):
    with several_models(*folders) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "a")
        until(lambda: loads.waiting == 1)
        server.stop.set()
        with pytest.raises(openai.InternalServerError) as caught:
            asked.result(60)
        assert caught.value.code == "server_stopping"
        if finishes:
            loads.opened.set()
        server.thread.join(30)
        assert not server.thread.is_alive()
        loads.opened.set()  # `close` waits for the load, and closes what it has loaded
    assert server.models.models[0].served is None or not hasattr(
        server.models.models[0].served, "model"
    )


def test_a_client_that_leaves_while_a_model_is_loaded_is_forgotten(folders, loads):
    with several_models(*folders) as server:
        connection = sent(server, {"model": "a", "messages": HELLO})
        until(lambda: loads.waiting == 1)
        connection.close()
        until(lambda: server.models.resources.admission.active == 0)
        loads.opened.set()
        until(lambda: server.states()["a"] == "loaded")
        assert server.models.models[0].users == 0
        assert ask(server, "a")


def test_pings_keep_a_stream_alive_while_its_model_is_loaded(folders, loads):
    with several_models(*folders, ping_interval=0.05) as server:
        connection = sent(server, {"model": "a", "messages": HELLO, "stream": True})
        assert b": ping" in read_until(connection, b": ping")
        loads.opened.set()
        assert b"[DONE]" in read_until(connection, b"[DONE]")


def test_requests_that_wait_for_a_model_count_as_waiting(folders, loads):
    limits = {"max_queue": 2, "max_batch": 1, "max_share": 1.0}
    with several_models(*folders, **limits) as server, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, server, "a") for _ in range(3)]

        def all_wait():  # for a while: a request whose body was read takes another slot to wait
            admission = server.models.resources.admission
            return all(admission.active == 3 and not time.sleep(0.01) for _ in range(30))

        until(all_wait)
        with pytest.raises(openai.RateLimitError):
            ask(server, "b")
        loads.opened.set()
        assert all(each.result(60) for each in asked)


def test_waiting_for_a_model_ends_in_time(folders, loads):
    with several_models(*folders, timeout=0.5) as server:
        with pytest.raises(openai.APIStatusError, match=r"not loaded after 0\.5 s") as caught:
            ask(server, "a")
        assert caught.value.status_code == 504
        loads.opened.set()
        until(lambda: server.states()["a"] == "loaded")


def test_a_slow_client_does_not_keep_its_model(folders):
    with several_models(
        *folders, loads_first=True, send_buffer=4096, **room_for(*folders)
    ) as server:
        many = {"max_tokens": 400, "logprobs": True, "top_logprobs": 20, "stream": True}
        slow = sent(server, {"model": "a", "messages": HELLO, "logit_bias": {}, **many})
        assert slow.recv(100)
        assert ask(server, "b")
        assert server.states()["a"] == "unloaded"
        assert b"[DONE]" in read_until(slow, b"[DONE]")  # nothing of the answer is lost


@pytest.mark.parametrize("patience", [32, 3])
def test_fifty_requests_for_models_that_dont_fit_together(folders, monkeypatch, patience):
    monkeypatch.setattr(model_registry, "PATIENCE", patience)
    with several_models(*folders, **room_for(*folders)) as server:
        alone = {name: ask(server, name) for name in "ab"}
        began = {name: server.count("model_loads_total", name) for name in "ab"}
        order = []

        def one(i):
            answer = ask(server, "ab"[i % 2])
            order.append("ab"[i % 2])
            return answer

        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(one, range(50)))
        assert answers == [alone["ab"[i % 2]] for i in range(50)]
        loads = sum(server.count("model_loads_total", name) - began[name] for name in "ab")
        # A turn answers the requests that came before the other model's oldest one, and `patience` more.
        assert 1 <= loads <= 2 + 50 // (patience + 1)
        if patience < 25:
            assert loads >= 25 // (patience + 16)
            assert "a" in order[:40]
            assert "b" in order[:40]


def test_a_busy_model_cant_starve_another(folders, monkeypatch):
    """Its own requests come without a pause, two at a time; the other's request is answered after a few."""
    monkeypatch.setattr(model_registry, "PATIENCE", 4)
    with several_models(*folders, loads_first=True, **room_for(*folders)) as server:
        done = threading.Event()
        after = []

        def busy():
            while not done.is_set():
                ask(server, "a", 20)
                after.append(started.is_set() and not done.is_set())

        started = threading.Event()
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(busy) for _ in range(2)]
            until(lambda: len(after) > 2)
            started.set()
            answer = pool.submit(ask, server, "b")
            with contextlib.ExitStack() as stack:
                stack.callback(done.set)
                assert answer.result(60)
            for each in running:
                each.result(60)
        assert sum(after) <= 4 + 2 + 2


def test_two_busy_models_cant_starve_a_third(monkeypatch):
    """Both have a request at any time; one of them has to go, and always the same one until it does."""
    monkeypatch.setattr(model_registry, "PATIENCE", 2)

    def loaded(name):
        return SimpleNamespace(
            name=name, nbytes=1, created=0, pool=None, model_ids=[name], close=lambda: None,
            engine=SimpleNamespace(engine=None),
        )  # fmt: skip

    def hosted(name, served):
        load = {"memory_bytes": 1, "load": lambda *_: loaded(name)}
        source = SimpleNamespace(name=name, adapter_names=[], **load)
        return HostedModel(source, served)

    async def answered():
        a, b, c = (hosted(name, loaded(name) if name != "c" else None) for name in "abc")
        models = ModelRegistry([a, b, c], ServerOptions(memory=2, prompt_cache_bytes=0, timeout=5))

        async def busy(model, delay):
            await asyncio.sleep(delay)
            while not c.users:
                await models.acquire(model, "")
                await asyncio.sleep(0.004)
                models.release(model)

        running = [asyncio.create_task(busy(m, d)) for m in (a, b) for d in (0, 0.001, 0.002)]
        await asyncio.sleep(0.01)
        assert await models.acquire(c, "") is c.served
        models.release(c)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        models.close()

    asyncio.run(answered())


def test_adapters_of_a_model_survive_its_eviction(folders):
    a, _ = folders
    folder = ADAPTERS.resolve()
    with (
        several_models(
            a, "afm-nano", adapter_folders=(folder,), **room_for(a, "afm-nano")
        ) as server,
        server.http() as http,
    ):
        load = {"name": "tidy", "path": "todo", "model": "afm-nano"}
        made = http.post("/v1/adapters", json=load)
        assert (made.status_code, made.json()["id"]) == (201, "afm-nano:tidy")
        ask(server, "a")
        assert server.states() == {"a": "loaded", "afm-nano": "unloaded"}
        ids = [each["id"] for each in http.get("/v1/models").json()["data"]]
        assert "afm-nano:tidy" in ids
        assert ask(server, "afm-nano:tidy")
        own = http.delete("/v1/adapters/afm-nano:todo")
        assert (own.status_code, own.json()["error"]["code"]) == (409, "adapter_stays")
        deleted = http.delete("/v1/adapters/afm-nano:tidy")
        assert deleted.json()["deleted"]
        missing = http.delete("/v1/adapters/tidy")  # of the first model
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "adapter_not_found")
        listed = http.get("/v1/adapters").json()
        assert {each["id"].split(":")[0] for each in listed["data"]} <= {"a", "afm-nano"}


def test_a_model_loads_without_an_adapter_whose_files_are_gone(folders, tmp_path, caplog):
    a, _ = folders
    shutil.copytree(ADAPTERS / "todo", tmp_path / "tidy")
    limits = {"adapter_folders": (tmp_path,), **room_for(a, "afm-nano")}
    with several_models(a, "afm-nano", **limits) as server, server.http() as http:
        load = {"name": "tidy", "path": "tidy", "model": "afm-nano"}
        assert http.post("/v1/adapters", json=load).status_code == 201
        ask(server, "a")
        assert server.states() == {"a": "loaded", "afm-nano": "unloaded"}
        shutil.rmtree(tmp_path / "tidy")
        assert ask(server, "afm-nano")
        assert "The adapter tidy of afm-nano is left out" in caplog.text
        with pytest.raises(openai.NotFoundError):
            ask(server, "afm-nano:tidy")
        own = http.delete("/v1/adapters/afm-nano:todo")
        assert (own.status_code, own.json()["error"]["code"]) == (409, "adapter_stays")


def test_a_model_whose_files_are_damaged_does_not_hide_the_others(folders, tmp_path):
    broken = write_family_folder(tmp_path / "broken", "qwen3", seed=3)
    (broken / "config.json").write_text("{")
    weights = broken / "model.safetensors"
    weights.unlink()
    weights.symlink_to("nowhere")
    with several_models(folders[0], broken) as server, server.http() as http:
        for path, key in (("/v1/models", "data"), ("/api/tags", "models")):
            reply = http.get(path)
            assert (reply.status_code, len(reply.json()[key])) == (200, 2)
        tagged, plain = (http.get(f"/v1/models/a{tag}").json() for tag in (":latest", ""))
        assert (tagged["parent"], tagged["disk_bytes"]) == (None, plain["disk_bytes"])


def test_the_context_is_as_long_before_a_load_as_after(folders):
    with several_models(*folders, max_kv_size=512) as server, server.http() as http:
        assert ask(server, "a")
        listed = http.get("/v1/models").json()["data"]
        assert [each["max_model_len"] for each in listed] == [512, 512]


def test_adapters_of_a_single_model_that_is_not_loaded(folders):
    with several_models(folders[0], keep_alive=1e12) as server, server.http() as http:
        assert http.get("/v1/adapters").json() == {"object": "list", "data": []}
        assert ask(server, "a")
        (loaded,) = http.get("/api/ps").json()["models"]
        assert loaded["expires_at"].startswith("9999-")


def test_places_and_prefixes_are_shared(folders):
    limits = {"max_batch": 2, "prompt_cache_bytes": 90_000}
    with several_models(*folders, **limits) as server:
        for name in "ab":
            ask(server, name)
        engines = [model.served.engine for model in server.models.models]
        caches = [model.served.prefix_cache for model in server.models.models]
        most = 0
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, server, "ab"[i % 2], 60) for i in range(8)]
            while not all(each.done() for each in asked):
                most = max(most, sum(each.engine.rows_running for each in engines))
                time.sleep(0.001)
        assert all(each.result() for each in asked)
        assert most <= 2
        for i in range(12):
            server.client.chat.completions.create(
                model="ab"[i % 2],
                messages=[{"role": "user", "content": f"{i} " + "more words " * 20}],
                max_tokens=2,
            )
            assert sum(cache.nbytes for cache in caches) <= 90_000
        assert all(cache.nbytes for cache in caches)
        assert sum(cache.evictions for cache in caches)


def sent(server, body):
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"Host: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + content)
    return connection


def read_until(connection, text):
    """Read until a text has come, or the end."""
    read = b""
    while text not in read and (part := connection.recv(1 << 16)):
        read += part
    return read
