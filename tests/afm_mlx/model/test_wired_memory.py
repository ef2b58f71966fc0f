"""The limit of resident memory, on a device that is made up: only Metal has one."""

import threading

import mlx.core as mx
import mlx.nn as nn
import pytest

from afm_mlx.model.wired_memory import wired_memory


@pytest.fixture
def limits(monkeypatch):
    """Those that were set, on a device that recommends 1,000 bytes; 7 was there before."""
    found = [7]

    def set_limit(limit):
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    return found


def test_the_limit_is_raised_and_put_back(limits):
    with pytest.raises(KeyError), wired_memory(nn.Linear(2, 2)):
        assert limits == [7, 1000]
        raise KeyError
    assert limits == [7, 1000, 7]


def test_a_model_of_that_size_is_warned_of(limits):
    with pytest.warns(UserWarning, match="iogpu"), wired_memory(nn.Linear(20, 20)):
        assert limits == [7, 1000]


def test_in_another_thread_it_stays(limits):
    thread = threading.Thread(target=lambda: wired_memory(nn.Linear(2, 2)).__enter__())
    thread.start()
    thread.join()
    assert limits == [7, 1000]


@pytest.mark.parametrize("place", [(mx, "device_info", dict), (mx.metal, "is_available", bool)])
def test_a_device_without_one(limits, monkeypatch, place):
    monkeypatch.setattr(*place)
    with wired_memory(nn.Linear(2, 2)):
        assert limits == [7]
