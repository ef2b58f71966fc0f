"""What a machine remembers of its self-test."""

import os
import sys
import time

import pytest

from afm_mlx.kernels import settings
from afm_mlx.kernels.selftest import checks
from afm_mlx.kernels.selftest.checks import ENDED, Verdict
from tests.tools.cases import each


def test_another_process_that_is_testing_now_is_no_failure(cache):
    Verdict().begin("cpu/fake")
    known = Verdict()
    assert (known.done, known.failures) == (False, {})


def test_a_process_id_that_is_another_processs_now_is_no_test(cache):
    """A variant's test takes moments; after a machine has stopped, process ids begin again."""
    Verdict().begin("cpu/fake")
    (path,) = cache.iterdir()
    leftover, new = path.with_name("selftest-0-x.tmp"), path.with_name("selftest-0-y.tmp")
    leftover.touch()
    for file in (path, leftover):
        os.utime(file, times=(time.time() - 2 * checks.TESTING_SECONDS,) * 2)
    new.touch()
    known = Verdict()
    assert known.failures == {"cpu/fake": ENDED}
    known.end(known.failures)
    assert sorted(cache.iterdir()) == sorted([path, new])


def test_what_ended_the_process_outlives_an_interrupt(cache):
    Verdict().end({"cpu/fake": ENDED, "cpu/other": "error 1 is over its bound, 0"})
    known = Verdict()
    assert (known.done, len(known.failures)) == (True, 2)
    known.forget(keep_ended=True)
    assert (known.done, known.failures) == (False, {"cpu/fake": ENDED})
    assert not Verdict().done


@each("text", ["", "{", "[]", '{"failures": 3, "running": null, "pid": 1}', "[" * 100_000])
def test_a_damaged_verdict_is_none(cache, text):
    Verdict().end({})
    (path,) = cache.iterdir()
    path.write_text(text)
    assert not Verdict().done


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(cache):
    cache.parent.write_text("a file where a folder should be")
    known = Verdict()
    known.begin("cpu/fake")
    known.end({})
    assert not Verdict().done
    known.forget()
    assert not known.done


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("darwin", {}, "Library/Caches/afm-mlx"),
        ("linux", {}, ".cache/afm-mlx"),
        ("linux", {"XDG_CACHE_HOME": "{home}/x"}, "x/afm-mlx"),
        ("linux", {settings.CACHE: "{home}/y"}, "y"),
    ],
)
def test_the_cache_folder(monkeypatch, tmp_path, platform, environment, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    for name in (settings.CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    assert settings.cache_folder() == tmp_path / folder
