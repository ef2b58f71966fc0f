"""What a Core ML package says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm_mlx.adapters.formats.mil_blob import check_blob
from afm_mlx.config import ModelConfig
from afm_mlx.coreml.availability import import_coremltools
from afm_mlx.errors import AFMError, CheckpointError, did_you_mean, named, shown

PREFILL, DECODE = "prefill", "decode"
_INPUTS, _STATES = {"tokens", "position"}, {"keys", "values"}


@dataclass(frozen=True)
class CoreMLPackage:
    """The description of a package.

    Args:
        path: the `.mlpackage` folder.
        config: the architecture of the model that it was made from.
        arrangement: of its operators, "linear" or "neural_engine".
        prompt_lengths: numbers of tokens that `prefill` takes, ascending.
        adapters: names of the adapters that have functions.
    """

    path: Path
    config: ModelConfig
    arrangement: str
    prompt_lengths: tuple[int, ...]
    adapters: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> CoreMLPackage:
        """Read a package's description; on any system that coremltools has a wheel for.

        Raises:
            AFMError: when coremltools is missing, the folder is no package or damaged, or the package was not
                made by `afm-mlx convert --to coreml`.
        """
        path = Path(path)
        spec = _read_spec(path)
        described = spec.description
        functions = {function.name: function for function in described.functions}
        for name in (PREFILL, DECODE):
            if name not in functions:
                raise CheckpointError(
                    f"{path} has no function {name}; it has {shown(sorted(functions) or ['main'])}. Make it "
                    "with afm-mlx convert --to coreml."
                )
            _check_function(path, functions[name])
        metadata = described.metadata.userDefined
        config = _config(path, metadata.get("afm_config", ""))
        _check_shapes(path, functions[DECODE], config)
        _check_weights(path, spec)
        return cls(
            path,
            config,
            metadata.get("arrangement", "linear"),
            tuple(sorted(_lengths(functions[PREFILL]))),
            tuple(
                name.removeprefix(f"{DECODE}_")
                for name in functions
                if name.startswith(f"{DECODE}_")
            ),
        )

    def function_names(self, adapter: str | None = None) -> tuple[str, str]:
        """The functions that read a prompt and that give logits, with an adapter or without.

        Raises:
            AFMError: when the package has no functions of that adapter.
        """
        if adapter is None:
            return PREFILL, DECODE
        if adapter not in self.adapters:
            raise AFMError(
                f"{self.path} has no adapter {shown(adapter)}{did_you_mean(adapter, self.adapters)}; it has "
                f"{shown(list(self.adapters))}. Adapters are taken along from the folder adapters of the model."
            )
        return f"{PREFILL}_{adapter}", f"{DECODE}_{adapter}"


def _read_spec(path: Path) -> Any:
    if not (path / "Manifest.json").is_file():
        what = "has no Manifest.json" if path.is_dir() else "is no folder"
        raise CheckpointError(
            f"{path} {what}; a Core ML package is a folder NAME.mlpackage. Make one with afm-mlx convert --to "
            "coreml."
        )
    coremltools = import_coremltools()
    from google.protobuf.message import DecodeError

    try:
        spec = coremltools.utils.load_spec(str(path))
    except (OSError, RuntimeError, ValueError, DecodeError) as error:
        raise CheckpointError(
            f"{path} can't be read: {' '.join(str(error).split())}. Copy or make it again."
        ) from error
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise CheckpointError(f"{path} holds a model of the kind {kind}; mlProgram is needed.")
    return spec


def _check_function(path: Path, function: Any) -> None:
    inputs, states = ({part.name for part in parts} for parts in (function.input, function.state))
    if (inputs, states) != (_INPUTS, _STATES):
        raise CheckpointError(
            f"{path}: {function.name} takes {sorted(inputs)} and has the states {sorted(states)}; needed are "
            f"{sorted(_INPUTS)} and {sorted(_STATES)}. Make it anew with afm-mlx convert --to coreml."
        )


def _config(path: Path, text: str) -> ModelConfig:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path}: its metadata has no afm_config, the model's architecture. Make it anew with "
            "afm-mlx convert --to coreml."
        )
    return ModelConfig.from_dict(values, source=f"afm_config in {path}")


def _check_shapes(path: Path, decode: Any, config: ModelConfig) -> None:
    """Hold the program's shapes against the architecture that the metadata speak of."""
    logits = next((part for part in decode.output if part.name == "logits"), None)
    found = {"logits": [] if logits is None else list(logits.type.multiArrayType.shape)}
    found |= {state.name: list(state.type.stateType.arrayType.shape) for state in decode.state}
    kv = [config.num_kv_layers, config.num_kv_heads, config.context_length, config.head_dim]
    needed = {"logits": [1, config.vocab_size], "keys": kv, "values": kv}
    for name, shape in needed.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{path}: {name} of {named(decode.name)} is {found[name]}, and its afm_config means {shape}. "
                "Make the package anew with afm-mlx convert --to coreml."
            )


def _lengths(prefill: Any) -> Iterator[int]:
    kind = next(part.type.multiArrayType for part in prefill.input if part.name == "tokens")
    for shape in [entry.shape for entry in kind.enumeratedShapes.shapes] or [kind.shape]:
        yield int(shape[-1])


def _check_weights(path: Path, spec: Any) -> None:
    """Raise `CheckpointError` when a file of weights is missing or ends before its last array."""
    folder = next(path.glob("Data/*/*.mlmodel")).parent
    last: dict[str, int] = {}
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            for operation in block.operations:
                for value in operation.attributes.values():
                    if value.WhichOneof("value") == "blobFileValue":
                        blob = value.blobFileValue
                        last[blob.fileName] = max(blob.offset, last.get(blob.fileName, 0))
    for name, offset in last.items():
        check_blob(folder / name.removeprefix("@model_path/"), offset)
