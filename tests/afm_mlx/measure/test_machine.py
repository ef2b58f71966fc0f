"""The bandwidth of memory: what is divided by what."""

from types import SimpleNamespace

import pytest

from afm_mlx.measure import machine as bandwidth


def test_bandwidth_is_the_buffer_over_the_fastest_pass(rng, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    seconds = rng.uniform(1, 9, bandwidth._PASSES)
    passes = iter(seconds)

    class Pool(bandwidth.ThreadPoolExecutor):
        def map(self, function, parts):
            parts = list(parts)
            assert sum(part.nbytes for part in parts) == 1000
            assert len(parts) == 3
            clock.now += next(passes)
            return super().map(function, parts)

    monkeypatch.setattr(bandwidth, "ThreadPoolExecutor", Pool)
    assert bandwidth.read_rate(3, 1000) == pytest.approx(1000 / seconds.min())


def test_bandwidth_is_measured_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(bandwidth, "read_rate", None)
    measured = bandwidth.measure_cpu_bandwidth(2, 1 << 22)
    assert measured.bytes_per_second > 1e6
    assert "2 threads" in measured.how
    with pytest.raises(ValueError, match="threads is 0; at least 1"):
        bandwidth.measure_cpu_bandwidth(0)
