"""An `.mlpackage`: its manifest, its model and its functions."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from coremltools.proto import Model_pb2

from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.errors import MILError
from tests.tools.mil.features import Features
from tests.tools.mil.function import Function


class Package:
    """A package that was read, whose functions can be run.

        package = Package("model.mlpackage")
        decode = package.function("decode")
        state = decode.make_state()
        logits = decode.predict({"token": token}, state)["logits"]

    Args:
        path: of the `.mlpackage` folder.
        compute: type in which floating-point operations run: `np.float32` or `np.float64`.
        round_floats: whether results are rounded to the types that the program gives them, as on a device that
            computes each operation exactly. Otherwise numbers of type float16 keep the precision of `compute`,
            in states, too.

    Attributes:
        spec: the message that describes the model.
        function_names: in the package's order; `["main"]` for a package that has only one.

    Raises:
        MILError: when it can't be read.
    """

    def __init__(self, path: str | Path, compute: type = np.float32, round_floats: bool = False):
        self.path = Path(path)
        self._compute, self._round_floats = np.dtype(compute), round_floats
        self._model_path = _model_path(self.path)
        self.spec = Model_pb2.Model()
        self.spec.ParseFromString(self._model_path.read_bytes())
        if self.spec.WhichOneof("Type") != "mlProgram":
            raise MILError(
                f"{self.path} is a {self.spec.WhichOneof('Type')}, expected an mlProgram"
            )
        described = self.spec.description
        self._descriptions = {f.name: f for f in described.functions} or {"main": described}
        self.function_names = list(self._descriptions)
        self._storage = functools.cache(self._open)
        if set(self.function_names) != set(self.spec.mlProgram.functions):
            raise MILError(
                f"{self.path} describes the functions {self.function_names}, "
                f"and its program has {sorted(self.spec.mlProgram.functions)}"
            )

    def function(self, name: str | None = None) -> Function:
        """A function, ready to be run.

        Args:
            name: of the function; None for the one that the package says is its default.

        Raises:
            MILError: when there is none of this name, or it has an operation that is not known here.
        """
        name = name or self.spec.description.defaultFunctionName or "main"
        if name not in self._descriptions:
            raise MILError(f"{self.path} has no function {name}; it has {self.function_names}")
        return Function(
            name,
            self.spec.mlProgram.functions[name],
            Features.described(self._descriptions[name]),
            self._storage,
            self._compute,
            self._round_floats,
        )

    def _open(self, name: str) -> BlobStorage:
        prefix = "@model_path/"
        if not name.startswith(prefix):
            raise MILError(f"weights in {name}, expected a path that starts with {prefix}")
        return BlobStorage(self._model_path.parent / name.removeprefix(prefix))


def _model_path(package: Path) -> Path:
    """The model's file, which the manifest names."""
    try:
        manifest = json.loads((package / "Manifest.json").read_text())
        items, root = manifest["itemInfoEntries"], manifest["rootModelIdentifier"]
        path = package / "Data" / items[root]["path"]
    except (OSError, ValueError, KeyError) as error:
        raise MILError(f"{package} has no manifest that names its model: {error}") from error
    missing = [i["path"] for i in items.values() if not (package / "Data" / i["path"]).exists()]
    if missing:
        raise MILError(f"{package} lacks {missing}, which its manifest names")
    return path
