"""Shares of devices in a plan of Core ML's."""

from afm_mlx.coreml import devices
from tests.tools.cases import each
from tests.tools.coreml import ADAPTER


class MLGPUComputeDevice: ...


class MLNeuralEngineComputeDevice: ...


class Plan:
    """coremltools' `MLComputePlan`, as far as it is asked: of operations that are (device, cost)."""

    def __init__(self, **functions):
        blocks = {name: Answer(block=Answer(operations=o)) for name, o in functions.items()}
        self.model_structure = Answer(program=Answer(functions=blocks) if blocks else None)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        device, _ = operation
        return None if device is None else Answer(preferred_compute_device=device())

    def get_estimated_cost_for_mlprogram_operation(self, operation):
        return None if operation[1] is None else Answer(weight=operation[1])


class Answer:
    def __init__(self, **values):
        self.__dict__.update(values)


GPU, ENGINE = MLGPUComputeDevice, MLNeuralEngineComputeDevice


@each(
    "functions, adapter, shares",
    [
        (
            {"prefill": [(None, None), (GPU, 0.125), (ENGINE, 0.375)], "decode": [(GPU, 2.0)]},
            None,
            {"prefill": {"GPU": 0.25, "Neural Engine": 0.75}, "decode": {"GPU": 1}},
        ),
        # Without costs, operations are counted; and without devices, nothing is said.
        (
            {
                "prefill_tone": [(GPU, None)] * 2 + [(ENGINE, None)] * 2,
                "decode_tone": [(None, 0.5)],
            },
            ADAPTER,
            {"prefill": {"GPU": 0.5, "Neural Engine": 0.5}},
        ),
        ({}, None, {}),
    ],
)
def test_shares_of_devices(core_ml, monkeypatch, functions, adapter, shares):
    compiled = Answer(plan=lambda units: Plan(**functions))
    monkeypatch.setattr(devices, "CompiledPackage", lambda path: compiled)
    assert devices.planned_devices(core_ml.package, "CPU_AND_GPU", adapter) == shares
