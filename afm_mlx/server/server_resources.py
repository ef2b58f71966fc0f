"""What all models of a server share: limits on requests and memory, threads for side work, and metrics."""

from __future__ import annotations

from afm_mlx.engine.prefix_cache import PrefixBudget
from afm_mlx.engine.scheduler import EngineGroup
from afm_mlx.server.admission import Admission, Workers
from afm_mlx.server.images import ImageMemory
from afm_mlx.server.metrics import ServerMetrics
from afm_mlx.server.server_options import ServerOptions


class ServerResources:
    """Limits, threads and metrics of a server, however many models it has."""

    def __init__(self, options: ServerOptions):
        self.admission = Admission(options)
        self.workers = Workers(self.admission)
        self.metrics = ServerMetrics()
        self.engines = EngineGroup()
        self.images = ImageMemory()
        self.prefixes: PrefixBudget | None = None
        if options.prompt_cache_bytes:
            self.prefixes = PrefixBudget(options.prompt_cache_bytes)

    def close(self) -> None:
        """End the threads."""
        self.workers.close()
