"""What all models of a server share: the limits on requests, the threads for side work, and the metrics."""

from __future__ import annotations

from afm_mlx.server.admission import Admission, Workers
from afm_mlx.server.metrics import ServerMetrics
from afm_mlx.server.server_options import ServerOptions


class ServerResources:
    """Limits, threads and metrics of a server, however many models it has."""

    def __init__(self, options: ServerOptions):
        self.admission = Admission(options)
        self.workers = Workers(self.admission)
        self.metrics = ServerMetrics()

    def close(self) -> None:
        """End the threads."""
        self.workers.close()
