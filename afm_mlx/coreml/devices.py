"""The devices that Core ML means to run a package's functions on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afm_mlx.coreml.functions import CompiledPackage
from afm_mlx.coreml.package import DECODE, PREFILL, CoreMLPackage

_DEVICES = {
    "MLCPUComputeDevice": "CPU",
    "MLGPUComputeDevice": "GPU",
    "MLNeuralEngineComputeDevice": "Neural Engine",
}


def planned_devices(
    package: str | Path, compute_units: str, adapter: str | None = None
) -> dict[str, dict[str, float]]:
    """The devices that Core ML means to run `prefill` and `decode` on, by their share of the cost.

    Args:
        package: the `.mlpackage` folder.
        compute_units: "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE" (the CPU and the Neural Engine) or "ALL".
        adapter: name of an adapter of the package; None for none.

    Returns:
        Shares of "CPU", "GPU" and "Neural Engine" by "prefill" and "decode"; without a function that Core ML
        says nothing of.

    Raises:
        AFMError: when the package is damaged or was made by others, has no such adapter, or can't run here.
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
    """Shares of the devices in a function's cost, from coremltools' `MLComputePlan`.

    Where the plan knows devices but no costs, each operation counts as much as another.
    """
    devices, costs = [], []
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is None:  # constants, and what the plan does not know
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
