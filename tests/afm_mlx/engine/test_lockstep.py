"""Ranks that hold parts of a model answer as one process does, and end together."""

import dataclasses
import json
import shutil
import signal
import socket
import threading
import time
import urllib.request

import mlx.core as mx
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.lockstep import (
    Lead,
    OutOfStepError,
    check_in_step,
    checksum,
    dismiss,
    register_adapter,
    request_of,
    request_values,
)
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Embedding, PromptLogprobs, Request
from afm_mlx.engine.samplers import make_logits_processors, make_sampler
from afm_mlx.errors import RequestError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.ranks import RankLostError, Ranks
from afm_mlx.track_config import TrackConfig
from tests.tools.adapters import draw_tensors
from tests.tools.adapters import write_folder as write_adapter
from tests.tools.cases import each
from tests.tools.cli import CONFIG, process, write_folder
from tests.tools.compare import assert_close
from tests.tools.rank_worker import start_ranks
from tests.tools.split_worker import Job, answers, split_answers
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

PENALTY = make_logits_processors(repetition_penalty=1.5)


def prompt(rng, length, vocab_size=100):
    return rng.integers(10, vocab_size, length).tolist()


def mixed(rng):
    """Requests of all kinds, more than a batch takes."""
    drawn = make_sampler(1.0, top_p=0.9)
    return [
        Request(prompt(rng, 70), 5),
        Request(prompt(rng, 5), 6, sampler=drawn, seed=3),
        Request(prompt(rng, 9), 60, sampler=drawn, seed=4),
        Request(prompt(rng, 6), 5, logits_processors=PENALTY),
        Request(prompt(rng, 40), 0, prompt_logprobs=PromptLogprobs(1, 2)),
        Request(prompt(rng, 11), 0, embedding=Embedding("mean")),
        Request(prompt(rng, 8), 3, logprobs=False),
    ]


def check_equal(found, wanted, near=1e-4):
    assert len(found) == len(wanted)
    for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours["tokens"] == theirs["tokens"], index
        assert not theirs.get("end", ("", ""))[1]  # no error
        assert (ours.get("end"), ours.get("cached")) == (theirs.get("end"), theirs.get("cached"))
        for name in ("scores", "vector"):
            if name in theirs:
                assert_close(ours[name], theirs[name], near, name)


def test_two_ranks_answer_as_one_process(tmp_path, spm_bpe, rng):
    """One start of processes: AFM and zoo models, rows of all kinds, adapters, drafts."""
    config = dataclasses.replace(CONFIG, num_layers=2)
    floats = write_folder(tmp_path / "floats", spm_bpe, rng, config)
    model, _ = load(floats)
    adapters = {}
    for name, keys in (("all", ""), ("some", "mlp")):
        adapters[name] = tmp_path / name
        write_adapter(adapters[name], draw_tensors(model, rng, 2, keys))
    with_adapters = [
        Request(prompt(rng, 8), 4, adapter=name)
        for name in ("all", "some", {"all": 0.5, "some": 1.0})
    ]
    colors = Constraint.regex("(red|green|blue)[0-9]{2}")
    constrained = Request(prompt(rng, 7), 30, constraint=colors)
    first = mixed(rng)
    longer = Request([*first[0].prompt, *prompt(rng, 4)], 4)  # the prefix cache has its beginning
    draft = write_folder(tmp_path / "draft", spm_bpe, rng, config)
    zoo = tmp_path / "qwen3"
    write_zoo_folder(zoo, "qwen3", zoo_model("qwen3", 128, 1), word_tokenizer_json(128))
    track_model = random_tracks(TrackConfig(**SMALL | {"vocab_size": 128}), 1)
    tracks = write_tracks_folder(tmp_path / "tracks", track_model)
    on_tracks = {}
    for name, keys in (("all tracks", ""), ("experts", "mlp.experts")):
        on_tracks[name] = tmp_path / name
        write_adapter(on_tracks[name], draw_tensors(track_model, rng, 2, keys))
    # Two that differ on rank 0 alone, on whose tracks alone one of them has pairs.
    of_first = draw_tensors(track_model, rng, 2, "layers.1.self_attn.qkv_proj")
    for name, tensors in (("first", of_first), ("other", {n: 2 * t for n, t in of_first.items()})):
        on_tracks[name] = tmp_path / f"of {name}"
        own = {n: t for n, t in tensors.items() if n.endswith((".0", ".1"))}
        write_adapter(on_tracks[name], own)
    with_track_adapters = [
        Request(prompt(rng, 6), 5, adapter=name)
        for name in ("all tracks", "experts", {"all tracks": 0.5, "experts": 1.0})
    ]
    same = prompt(rng, 9)
    in_turn = [[Request(same, 3, adapter=name)] for name in ("first", "other", "first")]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zoo / name, tracks / name)
    jobs = [
        Job(floats, [[*first, *with_adapters, constrained], [longer]], adapters, cancelled=2),
        Job(floats, [[*mixed(rng)[:2], constrained]], draft=draft),
        Job(zoo, [mixed(rng)[:4]]),
        Job(tracks, [[*mixed(rng)[:3], *with_track_adapters], *in_turn], on_tracks),
    ]
    asked = [Request(prompt(rng, 8), 2, adapter=name) for name in ("all", "some", None)]
    gone = write_adapter(tmp_path / "gone", draw_tensors(model, rng, 2))
    (gone / "adapters.safetensors").write_bytes(b"")
    others = {"all": adapters["some"], "some": gone}
    differing = Job(floats, [asked], adapters, others=others)
    *found, refused = split_answers(tmp_path, 2, *jobs, differing)
    assert "another one on rank 0 than on other ranks" in refused[0]["end"][1]
    assert refused[1]["end"][1].endswith("(rank 1)")
    assert refused[2]["end"] == ("length", "")
    for job, split in zip(jobs, found, strict=True):
        check_equal(split, answers(job))


# -- commands


def stdout(running):
    texts = [each.communicate(timeout=60) for each in running]
    return [out for out, _ in texts], [err for _, err in texts]


def test_the_command_prints_once(tmp_path):
    command = ["generate", "hello", "--max-tokens", "6", "--json"]
    running = start_ranks(tmp_path, 2, ["-m", "afm_mlx", *command])
    (first, second), errors = stdout(running)
    assert [each.returncode for each in running] == [0, 0], errors
    alone = json.loads(process(*command).stdout)
    found = json.loads(first)
    assert (found["tokens"], second) == (alone["tokens"], "")
    assert found["peak_memory_gb"] < 0.7 * alone["peak_memory_gb"]


BY_RANK = """
import os, sys
from afm_mlx.cli import main

for names in ("ab", "ac"):
    model = names[int(os.environ["MLX_RANK"])]
    argv = ["generate", "hello", "-m", "2", "--json", "--model", f"{sys.argv[1]}/{model}"]
    print(main(argv), file=sys.stderr)
"""


def test_ranks_may_have_one_model_in_different_folders(tmp_path, spm_bpe, rng):
    a = write_folder(tmp_path / "a", spm_bpe, rng)
    write_folder(tmp_path / "b", spm_bpe, rng)
    (tmp_path / "c").symlink_to(a)
    _, errors = stdout(start_ranks(tmp_path, 2, ["-c", BY_RANK, str(tmp_path)]))
    for text in errors:
        error, *statuses = [line for line in text.splitlines() if line]
        assert "error: The ranks differ: the model's fingerprint is '" in error
        assert statuses == ["2", "0"]


def test_a_command_ends_when_it_loses_a_rank(tmp_path):
    command = ["generate", "hello", "--max-tokens", "900", "--regex", "[ab]{800}"]
    running = start_ranks(tmp_path, 2, ["-m", "afm_mlx", *command])
    assert running[0].stdout.read(1)
    running[1].send_signal(signal.SIGKILL)
    error = running[0].communicate(timeout=30)[1]
    assert running[0].returncode in (1, 2)
    assert "error: Rank 0 of 2 has lost another rank, whose own message says why" in error


def post(port, path, body, method="POST"):
    headers = {"content-type": "application/json"}
    address, data = f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode()
    request = urllib.request.Request(address, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ask(port, index, **fields):
    body = {"model": "afm-nano", "prompt": f"{index} boats", "max_tokens": 12, **fields}
    return post(port, "completions", body)["choices"][0]


def test_a_server_of_two_ranks_answers_and_ends_when_it_loses_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    folder = ["--adapter-folder", str(resolve_model("afm-nano") / "adapters")]
    running = start_ranks(
        tmp_path,
        2,
        ["-m", "afm_mlx", "server", "--port", str(port), "--log-level", "ERROR", *folder],
    )
    assert "is served at" in running[0].stdout.readline()
    texts = {}

    def one(index):
        adapter = ["", ":todo", ":triage"][index % 3]
        texts[index] = ask(port, index, model=f"afm-nano{adapter}", temperature=index % 2)

    clients = [threading.Thread(target=one, args=(index,)) for index in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert set(texts) == set(range(8))
    assert texts[0]["text"] == ask(port, 0, temperature=0)["text"]
    for _ in range(2):  # the name is free again on all ranks
        post(port, "adapters", {"name": "mine", "path": "todo"})
        named = ask(port, 4, model="afm-nano:mine", temperature=0)
        assert named["text"] == texts[4]["text"]
        post(port, "adapters/mine", None, "DELETE")
    running[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    error = running[0].communicate(timeout=30)[1]
    assert time.monotonic() - killed < 10
    assert running[0].returncode == 1
    assert "error: Rank 0 of 2 has lost another rank, whose own message says why" in error


# -- what rank 0 sends


class Group:
    """What `Ranks` asks of a group."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@each(
    "request_",
    [
        Request([1, 2], 3),
        Request([1], 0, prompt_logprobs=PromptLogprobs(1, 2, (3, 4))),
        Request([1], 0, embedding=Embedding("mean", 4, False)),
        Request([1], 5, constraint=Constraint.choices(["a", "b"]), stop=["x"], client="me"),
        Request([1], adapter={"a": 0.5}, keeps_prefix=False, draft=False, at_limit="complete"),
    ],
)
def test_a_request_travels_as_json(request_):
    request_ = request_.checked(100)
    found = request_of(json.loads(json.dumps(request_values(request_)))).checked(100)
    assert found == request_


@each(
    "drawn", [{"sampler": make_sampler(1.0)}, {"logits_processors": make_logits_processors({1: 2})}]
)
def test_other_ranks_need_logits_where_rank_0_draws(drawn):
    values = json.loads(json.dumps(request_values(Request([1], **drawn).checked(100))))
    assert request_of(values).sampler(mx.array([[0.0, 2.0, 1.0]])).item() == 1


def lead(monkeypatch, said):
    monkeypatch.setattr(Ranks, "first", lambda self, value: said.append(value))

    class Owner:
        pass

    owner = Owner()
    options = {"prefix_cache": None, "adapters": None, "speculation": None}
    return owner, Lead(owner, Ranks(Group(0, 2)), options)


def test_what_other_ranks_can_not_follow_is_refused(monkeypatch, tmp_path):
    _, ours = lead(monkeypatch, [])
    for request, words in (
        (Request([1], cache=[]), "prompt cache"),
        (Request([1], sampler=lambda x: x), "make_sampler"),
        (Request([1], logits_processors=[lambda t, x: x]), "make_sampler"),
    ):
        with pytest.raises(RequestError, match=words):
            ours.check(request)
    ours.check(Request([1], sampler=make_sampler(0.5)))
    with pytest.raises(RequestError, match="folder"):
        kept = PrefixCache(1 << 20, tmp_path)
        Lead(object(), Ranks(Group(0, 2)), {"prefix_cache": kept})


def test_an_adapter_is_registered_on_all_ranks_or_none(monkeypatch, spm_bpe, tmp_path, rng):
    model, _ = load(write_folder(tmp_path / "floats", spm_bpe, rng))
    pool, said, problem = AdapterPool(model), [], "no such path"
    adapter = write_adapter(tmp_path / "adapter", draw_tensors(model, rng, 2))
    monkeypatch.setattr(Ranks, "first", lambda self, event: said.append(event["path"]))
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, problem])
    model.ranks = Ranks(Group(0, 2))
    with pytest.raises(RequestError, match=r"no such path \(rank 1\)"):
        register_adapter(model, pool, "mine", adapter)
    assert (said, pool.registered) == ([str(adapter), None], [])
    problem = ""
    register_adapter(model, pool, "mine", adapter)
    assert pool.registered == ["mine"]


def test_engines_that_are_gone_are_dropped(monkeypatch):
    said = []
    owner, ours = lead(monkeypatch, said)
    number = said[0]["engine"]
    del owner
    ours.say("cancel", row=1)
    assert number in said[-1]["gone"]


def test_a_step_that_fails_ends_all_exchanges(monkeypatch):
    ranks = Ranks(Group(0, 2))
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: x)
    ours = Lead(
        type("Owner", (), {})(), ranks, {"prefix_cache": None, "adapters": 1, "speculation": 1}
    )
    with pytest.raises(ZeroDivisionError), ours.step([], []):
        raise ZeroDivisionError("no")
    with pytest.raises(
        RankLostError, match=r"A step of the ranks has failed \(ZeroDivisionError: no\)"
    ):
        ours.say("cancel", row=1)


def test_nothing_is_exchanged_after_a_failed_exchange(monkeypatch):
    called = []

    def all_sum(x, group):
        called.append(x)
        raise RuntimeError("connection lost")

    monkeypatch.setattr(mx.distributed, "all_sum", all_sum)
    ranks = Ranks(Group(0, 2))
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"another rank.*\(connection lost\)"):
            ranks.first(1)
    assert len(called) == 1


def test_the_last_exchange_is_watched(monkeypatch):
    one, other = socket.socketpair()
    with one, other:
        ranks, watching = Ranks(Group(0, 2), connections=frozenset([one.fileno()])), []

        def first(*_):
            watching.append(is_watched())
            raise RankLostError

        def is_watched():
            return "afm-mlx ranks" in [thread.name for thread in threading.enumerate()]

        monkeypatch.setattr(Ranks, "first", first)
        ranks.watch(print)
        with pytest.raises(RankLostError):
            dismiss(ranks)
        assert watching == [True]
        assert not is_watched()


def test_ctrl_c_waits_for_the_end_of_a_step(monkeypatch):
    _, ours = lead(monkeypatch, [])
    done = []
    with pytest.raises(KeyboardInterrupt), ours.step([], []):
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done


def test_rows_that_differ_are_out_of_step(spm_bpe, tmp_path, rng):
    model, tokenizer = load(write_folder(tmp_path / "floats", spm_bpe, rng))
    engine = Engine(model, tokenizer)
    engine.submit(Request([5, 6, 7], 4))
    rows = engine._scheduler.waiting
    check_in_step(checksum(rows, []), rows, [])
    with pytest.raises(OutOfStepError, match="out of step"):
        check_in_step(checksum(rows, []), [], rows)
