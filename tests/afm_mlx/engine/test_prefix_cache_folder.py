"""Blocks of a prefix cache in files: found by later processes, and never read wrongly."""

import errno
import hashlib
import json
import os
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from afm_mlx.engine import prefix_cache_folder
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PAGE, PrefixCache
from afm_mlx.engine.prefix_cache_folder import SUFFIX, PageLayout, PrefixFolder, page_name
from afm_mlx.engine.request import Request
from afm_mlx.errors import RequestError
from tests.tools.engines import SIZES, run, some_prompt, tiny
from tests.tools.zoo import zoo_model

LARGE = 1 << 30


def asked(model, tokenizer, prefixes, prompt, kv="int8", **options):
    """The answer, and how many tokens were found."""
    engine = Engine(model, tokenizer, prefix_cache=prefixes, kv=kv)
    row = engine.submit(Request(prompt, 4, logprobs=False, **options))
    responses = run(engine)[row]
    prefixes.close()
    return [r.token for r in responses], responses[-1].cached_tokens


@pytest.fixture
def ask(tokenizer, tmp_path):
    """Ask in a process of its own, so to say."""

    def ask(model, prompt, budget=LARGE, folder_budget=LARGE, **options):
        prefixes = PrefixCache(budget, tmp_path / "kept", folder_budget)
        answer = asked(model, tokenizer, prefixes, prompt, **options)
        assert not [path for path in (tmp_path / "kept").iterdir() if path.suffix != SUFFIX]
        sizes = [path.stat().st_size for path in (tmp_path / "kept").iterdir()]
        assert sum(sizes) <= folder_budget
        return answer

    return ask


def files(folder):
    return sorted((folder / "kept").iterdir())


@pytest.mark.parametrize("kind", ["int8", "float", "zoo"])
def test_a_later_process_finds_whole_blocks(rng, ask, tmp_path, kind):
    model = tiny(rng, kv_bits=8)
    if kind == "zoo":
        model = zoo_model("llama", SIZES["vocab_size"], 3)
    kv = "int8" if kind == "int8" else "float"
    prompt = some_prompt(rng, 3 * PAGE + 10)
    answer, found = ask(model, prompt, kv=kv)
    assert (found, len(files(tmp_path))) == (0, 3)
    assert ask(model, prompt, kv=kv) == (answer, 3 * PAGE)
    assert ask(model, prompt, kv=kv, client="other")[1] == 0
    other = [*prompt[: 2 * PAGE + 3], *some_prompt(rng, 9)]
    answer, found = ask(model, other, kv=kv)
    assert found == 2 * PAGE
    assert answer == ask(model, other, kv=kv, client="third")[0]
    assert ask(tiny(rng, kv_bits=8), prompt, kv=kv if kind != "zoo" else "int8")[1] == 0
    assert tmp_path.joinpath("kept").stat().st_mode & 0o077 == 0


def test_files_that_are_not_as_they_were_written_are_removed(rng, ask, tmp_path):
    model = tiny(rng, kv_bits=8)
    prompt = some_prompt(rng, 2 * PAGE + 5)
    answer, _ = ask(model, prompt)
    whole = {path: path.read_bytes() for path in files(tmp_path)}
    assert len(whole) == 2

    def damaged(data):
        at = int(rng.integers(len(data)))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    for change in (damaged, lambda data: data[: len(data) // 2], lambda data: b""):
        for path, data in whole.items():
            path.write_bytes(change(data))
        tokens, found = ask(model, prompt)
        assert (tokens, found) == (answer, 0)
        # The first one was read, removed, and written again.
        assert sum(path.read_bytes() == data for path, data in whole.items()) >= 1
        for path, data in whole.items():
            path.write_bytes(data)
    one, other = whole
    one.write_bytes(whole[other])  # by hand
    other.write_bytes(whole[one])
    assert ask(model, prompt) == (answer, 0)
    left = tmp_path / "kept" / ".0123.prefix-abc.afm-mlx"  # of a process that was killed
    left.mkdir()
    foreign = tmp_path / "kept" / "notes.txt"
    foreign.write_text("somebody's")
    PrefixCache(LARGE, tmp_path / "kept", 1).close()
    assert files(tmp_path) == [foreign]


def forged(data, change):
    """A file with another head, and a digest that is right for it."""
    length = int.from_bytes(data[32:40], "little")
    head = change(json.loads(data[40 : 40 + length]))
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    body = len(head).to_bytes(8, "little") + head + data[40 + length :]
    return hashlib.sha256(body).digest() + body


def test_a_right_digest_makes_no_head_right(rng, ask, tmp_path):
    model = tiny(rng, kv_bits=8)
    prompt = some_prompt(rng, 2 * PAGE + 5)
    answer, _ = ask(model, prompt)
    whole = {path: path.read_bytes() for path in files(tmp_path)}

    def arrays(change):
        return lambda head: head | {"arrays": [change(*array) for array in head["arrays"]]}

    def places(change):
        return lambda head: head | {"places": change(head["places"])}

    changes = [
        arrays(lambda dtype, shape: ["mlx.core.float32", [*shape[:3], shape[3] // 4]]),
        arrays(lambda dtype, shape: [dtype, [shape[0], shape[1] // 2, shape[2] * 2, shape[3]]]),
        arrays(lambda dtype, shape: [dtype, [*shape[:3], 2**62]]),
        arrays(lambda dtype, shape: [dtype, [-1]]),
        arrays(lambda dtype, shape: [[], shape]),
        lambda head: head | {"arrays": []},
        places(lambda old: old[::-1]),
        places(lambda old: [[7, 0], *old[1:]]),
        places(lambda old: [[0, -1], *old[1:]]),
        places(lambda old: []),
        places(lambda old: 5),
        lambda head: [],
        lambda head: b"[" * 100_000,
        lambda head: b"",
    ]
    for change in changes:
        for path, data in whole.items():
            path.write_bytes(forged(data, change))
        assert ask(model, prompt) == (answer, 0)
        # The first one was read, removed, and written again.
        assert any(path.read_bytes() == data for path, data in whole.items())
    for path, data in whole.items():
        path.write_bytes(data + b"x")
    assert ask(model, prompt) == (answer, 0)
    assert any(path.read_bytes() == data for path, data in whole.items())


def test_processes_that_share_a_folder_keep_to_its_budget_together(tmp_path):
    arrays = [mx.zeros((1, 1, PAGE, 16))]
    mx.eval(arrays)
    layout = PageLayout.of(((0, 0),), arrays, PAGE)
    names = [page_name("", bytes([number])) for number in range(12)]
    size = 32 + len(layout.head(names[0])) + arrays[0].nbytes
    # A lock of the folder keeps two objects apart as it does two processes.
    one, other = (PrefixFolder(tmp_path, 4 * size + 1) for _ in range(2))

    def fill(folder, names):
        for name in names:
            folder.write(name, layout.places, arrays)
            folder._writer.submit(int).result()
            with folder._alone():  # else files come and go while they are counted
                sizes = [path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")]
            assert sum(sizes) <= folder.budget

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(fill, one, names[:5]), threads.submit(fill, other, names[5:8])]:
            done.result()
    fill(one, names[8:10])
    fill(other, names[10:11])
    kept = {path.stem for path in tmp_path.glob(f"*{SUFFIX}")}
    assert len(kept) == 4
    assert kept > {*names[8:11]}
    # What another process has used is not the oldest.
    assert len(other.read(names[8:9], layout).result()) == 1
    fill(one, names[11:12])
    kept = {path.stem for path in tmp_path.glob(f"*{SUFFIX}")}
    assert kept == {names[8], names[9], names[10], names[11]}
    fill(one, names[:1])
    assert {path.stem for path in tmp_path.glob(f"*{SUFFIX}")} == {names[i] for i in (0, 8, 10, 11)}
    for folder in (one, other):
        folder.close()


def test_the_folder_keeps_to_its_budget(rng, ask, tmp_path):
    model = tiny(rng, kv_bits=8)
    prompts = [some_prompt(rng, PAGE + 1) for _ in range(4)]
    ask(model, prompts[0])
    (file,) = files(tmp_path)
    budget = int(2.5 * file.stat().st_size)
    for prompt in prompts[1:3]:
        ask(model, prompt, folder_budget=budget)
    assert ask(model, prompts[1], folder_budget=budget)[1] == PAGE  # it was used
    ask(model, prompts[3], folder_budget=budget)
    assert ask(model, prompts[1], budget=1, folder_budget=budget)[1] == 0  # no room in memory
    found = [ask(model, prompts[i], folder_budget=budget)[1] for i in (1, 3, 0)]
    assert found == [PAGE, PAGE, 0]


def test_a_full_disk_ends_writing_with_one_warning(rng, ask, tmp_path, monkeypatch):
    model = tiny(rng, kv_bits=8)
    prompt = some_prompt(rng, 4 * PAGE)
    write = Path.write_bytes

    def full(path, data):
        write(path, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer, _ = ask(model, prompt)
    assert [str(w.message).count("No space left") for w in caught] == [1]
    assert files(tmp_path) == []
    monkeypatch.undo()
    assert ask(model, prompt) == (answer, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="can't be used"):
        PrefixCache(LARGE, tmp_path / "file")


def test_rows_go_on_while_files_are_read(rng, ask, tokenizer, tmp_path, monkeypatch):
    model = tiny(rng, kv_bits=8)
    prompt, gate = some_prompt(rng, 2 * PAGE + 5), threading.Event()
    answer, _ = ask(model, prompt)
    decoded = prefix_cache_folder._decoded
    monkeypatch.setattr(
        prefix_cache_folder, "_decoded", lambda *file: (gate.wait(), decoded(*file))[1]
    )
    prefixes = PrefixCache(LARGE, tmp_path / "kept")
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    company = engine.submit(Request(some_prompt(rng, 3), 20, logprobs=False))
    row, cancelled = (engine.submit(Request(prompt, 4, logprobs=False)) for _ in range(2))
    engine.step()
    responses = [response for _ in range(10) for response in engine.step()]
    assert {response.row for response in responses} == {company}
    assert engine.rows_waiting == 2
    engine.cancel(cancelled)
    gate.set()
    responses = run(engine)[row]
    assert [r.token for r in responses] == answer
    assert responses[-1].cached_tokens == 2 * PAGE
    prefixes.close()


@contextmanager
def no_superuser():
    """Run as a user who may not write what others own."""
    if os.geteuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_that_may_only_be_read_is_read(rng, tokenizer):
    model, prompt = tiny(rng, kv_bits=8), some_prompt(rng, 2 * PAGE + 10)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        answer, _ = asked(model, tokenizer, PrefixCache(LARGE, kept), prompt)
        stored = sorted(kept.iterdir())
        Path(folder).chmod(0o755)
        for file in stored:
            file.chmod(0o444)
        kept.chmod(0o555)
        with no_superuser():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                prefixes = PrefixCache(LARGE, kept, folder_budget=1)  # nor is anything removed
                assert asked(model, tokenizer, prefixes, prompt) == (answer, 2 * PAGE)
            (warning,) = caught
            assert "may only be read. It goes on in memory, and reads" in str(warning.message)
        assert sorted(kept.iterdir()) == stored
        kept.chmod(0o755)
