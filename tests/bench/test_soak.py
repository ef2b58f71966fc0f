"""The measurement of memory over time: its verdict by hand, and a short run of all kinds of requests."""

import dataclasses
import json

import pytest

from bench import soak


def samples(resident):
    blank = {field.name: 0 for field in dataclasses.fields(soak.Sample)}
    return [soak.Sample(**blank | {"minutes": i, "resident": mb}) for i, mb in enumerate(resident)]


def test_the_slope_is_that_of_the_last_half():
    found = samples([100, 200, 300, 300, 302, 304, 306, 308])
    assert soak.slope(found, "resident") == pytest.approx(2)
    assert soak.slope(found[:1], "resident") == 0


def test_growth_that_has_ended_is_level_and_growth_that_goes_on_is_not():
    assert soak.levelled_off(samples([300, 380, 400, 401, 400, 401, 400, 401]))
    assert not soak.levelled_off(samples(range(300, 420)))
    assert soak.levelled_off(samples([300] * 4 + [301, 299, 302, 300]))


def test_a_wave_has_requests_of_every_kind(tmp_path, capsys):
    file = tmp_path / "samples.json"
    argv = ["--minutes", "0", "--every", "0", "--rows", "6", "--adapters", "2", "--trim"]
    assert soak.main([*argv, "--output", str(file)]) == 0
    assert "levelled off" in capsys.readouterr().out
    (sample,) = json.loads(file.read_text())
    assert sample["requests"] == 7
    assert sample["tokens"] > 0
    assert sample["loads"] > 2
    assert sample["resident"] > sample["active"] > 0
