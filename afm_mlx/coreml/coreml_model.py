"""Running a Core ML package on a Mac, through coremltools: prompts to logits, and which device runs what."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from afm_mlx.coreml.availability import import_coremltools, obstacle
from afm_mlx.coreml.package import DECODE, PREFILL, CoreMLPackage
from afm_mlx.errors import AFMError, reason_of, shown
from afm_mlx.model.exported_model import ExportedModel

COMPUTE_UNITS = ("CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE", "ALL")
"""Devices that a package may run on; `CPU_AND_NE` is the CPU and the Neural Engine."""


class LoadedFunction(Protocol):
    """A loaded function of coremltools."""

    def make_state(self) -> Any: ...

    def predict(self, inputs: dict[str, np.ndarray], state: Any) -> Mapping[str, np.ndarray]:
        """Return the outputs by name, and write new keys and values into `state`."""


class CompiledPackage:
    """A package compiled by Core ML, in a folder that is deleted with this object.

    Raises:
        AFMError: if Core ML can't run here, or can't compile the package.
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
            raise AFMError(f"Core ML can't compile {path}: {reason_of(error)}") from error

    def load(self, names: Sequence[str], compute_units: str) -> list[LoadedFunction]:
        """Load functions, which for the Neural Engine may take minutes.

        Raises:
            AFMError: if Core ML can't load one.
        """
        units = self._units(compute_units)
        try:
            return [
                self._tools.models.CompiledMLModel(self._compiled, units, function_name=name)
                for name in names
            ]
        except RuntimeError as error:
            raise AFMError(
                f"Core ML can't load {', '.join(names)} of {self.path} for {compute_units}: {reason_of(error)}"
            ) from error

    def plan(self, compute_units: str) -> Any:
        """Return coremltools' `MLComputePlan` for the package on these compute units."""
        plans = self._tools.models.compute_plan.MLComputePlan
        return plans.load_from_path(self._compiled, self._units(compute_units))

    def _units(self, name: str) -> Any:
        if name not in COMPUTE_UNITS:
            raise AFMError(
                f"compute_units is {shown(name)}; allowed are {', '.join(COMPUTE_UNITS)}."
            )
        return self._tools.ComputeUnit[name]


class CoreMLModel(ExportedModel):
    """A loaded package of `afm-mlx convert --to coreml`, with the keys and values of one conversation.

        model = CoreMLModel("model.mlpackage", compute_units="CPU_AND_NE")
        for token in model.greedy(prompt, max_tokens=100, end_tokens={2}):
            ...

    Args:
        package: the `.mlpackage` folder.
        compute_units: "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE" (the CPU and the Neural Engine) or "ALL".
        adapter: name of an adapter of the package; pass None for none.

    Attributes:
        package: the package's description.
        position: number of tokens that have keys and values.

    Raises:
        AFMError: if the package is damaged or was made by others, has no such adapter, or can't run here.
    """

    def __init__(
        self, package: str | Path, compute_units: str = "ALL", adapter: str | None = None
    ) -> None:
        self.package = CoreMLPackage.read(package)
        self._units = compute_units
        self._compiled = CompiledPackage(self.package.path)
        self._prefill, self._decode = self._compiled.load(
            self.package.function_names(adapter), compute_units
        )
        self._state = self._decode.make_state()
        super().__init__(self.package.config, self.package.prompt_lengths)

    def read_prompt(self, tokens: np.ndarray, count: int) -> None:
        end = self._call(self._prefill, tokens)["next_position"]
        # Core ML has been seen to run another length than it was given, without an error.
        if (read := int(end[0]) - self.position) != len(tokens):
            raise AFMError(
                f"Core ML read {read} tokens of {len(tokens)}, on {self._units}. Try other compute "
                "units, or a package with one prompt length."
            )

    def read_token(self, token: int) -> np.ndarray:
        logits = self._call(self._decode, np.array([token], np.int32))["logits"]
        return np.asarray(logits, np.float32).reshape(-1)

    def _call(self, function: LoadedFunction, tokens: np.ndarray) -> dict[str, np.ndarray]:
        inputs = {"tokens": tokens[None], "position": np.array([self.position], np.int32)}
        return dict(function.predict(inputs, self._state))


# -- devices

_DEVICES = {
    "MLCPUComputeDevice": "CPU",
    "MLGPUComputeDevice": "GPU",
    "MLNeuralEngineComputeDevice": "Neural Engine",
}


def planned_devices(
    package: str | Path, compute_units: str, adapter: str | None = None
) -> dict[str, dict[str, float]]:
    """Return the devices that Core ML plans to run `prefill` and `decode` on, by their share of the cost.

    Args:
        package: the `.mlpackage` folder.
        compute_units: "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE" (the CPU and the Neural Engine) or "ALL".
        adapter: name of an adapter of the package; pass None for none.

    Returns:
        Shares of "CPU", "GPU" and "Neural Engine" by "prefill" and "decode", without functions that the plan
        does not cover.

    Raises:
        AFMError: if the package is damaged or was made by others, has no such adapter, or can't run here.
    """
    described = CoreMLPackage.read(package)
    names = described.function_names(adapter)
    plan = CompiledPackage(described.path).plan(compute_units)
    program = plan.model_structure.program
    functions = {} if program is None else program.functions
    kinds = zip((PREFILL, DECODE), names, strict=True)
    shares = {
        kind: device_shares(plan, functions[name]) for kind, name in kinds if name in functions
    }
    return {kind: found for kind, found in shares.items() if found}


def device_shares(plan: Any, function: Any) -> dict[str, float]:
    """Return the shares of devices in a function's cost, from coremltools' `MLComputePlan`.

    If the plan has devices but no costs, all operations count the same.
    """
    devices, costs = [], []
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is None:  # constants, and operations that the plan does not cover
            continue
        kind = type(usage.preferred_compute_device).__name__
        devices.append(_DEVICES.get(kind, kind))
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        costs.append(0.0 if cost is None else float(cost.weight))
    if not any(costs):
        costs = [1.0] * len(devices)
    total = sum(costs)
    return {
        device: sum(c for d, c in zip(devices, costs, strict=True) if d == device) / total
        for device in sorted(set(devices))
    }
