"""Benchmarks of afm-mlx, of its server and of peers: `python -m bench.NAME` in a checkout; not installed."""
