"""A model that a server has, loaded or not: its ids, its state and its sizes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from afm_mlx.errors import AFMError
from afm_mlx.server.replies import JsonObject
from afm_mlx.server.served_model import ModelSource, ServedModel
from afm_mlx.vision_config import VisionConfig


class HostedModel:
    """A model that a server has, loaded or not.

    Args:
        source: how to load it; pass None for a model that stays loaded.
        served: the loaded model; pass None to load it when a request needs it.

    Attributes:
        name: its id in the APIs.
        state: "unloaded", "loading", "loaded" or "unloading".
        created: time at which it was listed or loaded first, in seconds since 1970.
        users: number of leases that hold it.
        used: time at which the last lease began or ended, by `time.monotonic`.
    """

    def __init__(self, source: ModelSource | None, served: ServedModel | None = None):
        known = served or source
        assert known is not None
        self.name = known.name
        self.source, self.served = source, served
        self.state = "loaded" if served else "unloaded"
        self.created = served.created if served else int(time.time())
        self.users = 0
        self.used = time.monotonic()

    @property
    def ids(self) -> list[str]:
        """The model's id and its adapters' ids."""
        if (served := self.served) is not None:  # once, because other threads ask, too
            return served.model_ids
        names = self.source.adapter_names if self.source else []
        return [self.name, *(f"{self.name}:{adapter}" for adapter in names)]

    @property
    def default_adapter(self) -> str | None:
        """The adapter of requests for the model's own id."""
        known = self.served or self.source
        return known.default_adapter if known else None

    @property
    def folder(self) -> Path | None:
        """The model's folder, or None if unknown."""
        known = self.source or self.served
        return known.folder if known else None

    @property
    def vision_config(self) -> VisionConfig | None:
        """How the model sees images; None if it reads text only."""
        if (served := self.served) is not None:
            return served.vision_config
        with contextlib.suppress(AFMError, OSError):  # loading says what is wrong
            return self.source.vision_config if self.source else None
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory; an estimate before it is loaded."""
        if (served := self.served) is not None:
            return served.nbytes
        with contextlib.suppress(AFMError, OSError):  # loading says what is wrong
            return self.source.memory_bytes if self.source else 0
        return 0

    def describe(self) -> JsonObject:
        """Return its state and sizes as JSON values, for listings."""
        return {
            "state": self.state,
            "disk_bytes": self.source.disk_bytes if self.source else None,
            "memory_bytes": self.nbytes if self.state == "loaded" else 0,
        }

    def gauges(self) -> Iterator[tuple[str, str, float]]:
        """Yield name, help and value of the gauges that are read when metrics are requested."""
        served = self.served
        if served is not None:
            yield from served.gauges()
        yield "model_loaded", "1 if the model is in memory.", served is not None
        yield "model_memory_bytes", "Memory of the weights.", served.nbytes if served else 0
