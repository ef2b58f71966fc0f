"""Functions of a package that are loaded, through coremltools."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from afm_mlx.coreml.availability import import_coremltools, obstacle
from afm_mlx.errors import AFMError, shown

COMPUTE_UNITS = ("CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE", "ALL")
"""What a package may run on; `CPU_AND_NE` is the CPU and the Neural Engine."""


class LoadedFunction(Protocol):
    """A function, as coremltools has it."""

    def make_state(self) -> Any:
        """Keys and values, all zeros; functions of one package share them."""

    def predict(self, inputs: dict[str, np.ndarray], state: Any) -> Mapping[str, np.ndarray]:
        """Outputs by name; the state is written to."""


class CompiledPackage:
    """A package that Core ML has compiled into a folder of its own, which goes with this object.

    Args:
        path: the `.mlpackage` folder.

    Raises:
        AFMError: when Core ML can't run here, or can't compile the package.
    """

    def __init__(self, path: Path) -> None:
        if reason := obstacle():
            raise AFMError(f"{path} can't run here: {reason}.")
        self.path = path
        self._tools = import_coremltools()
        folder = tempfile.mkdtemp(prefix="afm-mlx-coreml-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        compiled = Path(folder) / f"{path.stem}.mlmodelc"
        try:
            self._compiled = self._tools.models.utils.compile_model(str(path), str(compiled))
        except RuntimeError as error:
            raise AFMError(f"Core ML can't compile {path}: {_one_line(error)}") from error

    def load(self, names: Sequence[str], compute_units: str) -> list[LoadedFunction]:
        """Functions that are ready to run; for the Neural Engine this may take minutes.

        Args:
            names: of the functions.
            compute_units: one of `COMPUTE_UNITS`.

        Raises:
            AFMError: when Core ML can't load one.
        """
        units = self._units(compute_units)
        try:
            return [
                self._tools.models.CompiledMLModel(self._compiled, units, function_name=name)
                for name in names
            ]
        except RuntimeError as error:
            raise AFMError(
                f"Core ML can't load {', '.join(names)} of {self.path} for {compute_units}: {_one_line(error)}"
            ) from error

    def plan(self, compute_units: str) -> Any:
        """coremltools' `MLComputePlan` for the package on some compute units."""
        plans = self._tools.models.compute_plan.MLComputePlan
        return plans.load_from_path(self._compiled, self._units(compute_units))

    def _units(self, name: str) -> Any:
        if name not in COMPUTE_UNITS:
            raise AFMError(
                f"compute_units is {shown(name)}; allowed are {', '.join(COMPUTE_UNITS)}."
            )
        return self._tools.ComputeUnit[name]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
