"""The description of a Core ML package, read and checked on any system that coremltools has a wheel for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from afm_mlx.adapters.formats.mil_blob import check_blob
from afm_mlx.config import ModelConfig
from afm_mlx.coreml.availability import import_coremltools
from afm_mlx.errors import AFMError, CheckpointError, did_you_mean, named, reason_of, shown
from afm_mlx.files import read_file

PREFILL, DECODE = "prefill", "decode"
ARRANGEMENTS = ("linear", "neural_engine")
_INPUTS, _STATES, _END = ["position", "tokens"], ["keys", "values"], "next_position"
_MANIFEST_BYTES, _MODEL_BYTES = 1 << 20, 512 << 20
_PATH = 200  # characters of a file's path in a package


@dataclass(frozen=True)
class CoreMLPackage:
    """Description of a package: the `.mlpackage` folder `path`, and what it holds.

    Args:
        arrangement: "linear" or "neural_engine", the arrangement of operators.
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
        """Read a package's description.

        Raises:
            AFMError: if coremltools is missing, the folder is no package or damaged, or the package was not
                made by `afm-mlx convert --to coreml`.
        """
        path = Path(path)
        model = _model_file(path)
        spec = _read_spec(path, model)
        functions = {function.name: function for function in spec.description.functions}
        if len(functions) < len(spec.description.functions):
            _fail(path, "two of its functions have one name")
        for name in (PREFILL, DECODE):
            if name not in functions:
                found = shown(sorted(functions) or ["main"])
                raise CheckpointError(
                    f"{path} has no function {name}; it has {found}. Make it with afm-mlx convert --to coreml."
                )
        metadata = spec.description.metadata.userDefined
        try:
            values = json.loads(metadata.get("afm_config", ""))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            _fail(path, "its metadata has no afm_config, the model's architecture")
        config = ModelConfig.from_dict(values, source=f"afm_config in {path}")
        arrangement = metadata.get("arrangement", ARRANGEMENTS[0])
        if arrangement not in ARRANGEMENTS:
            _fail(path, f"its arrangement is {shown(arrangement)}; known are {ARRANGEMENTS}")
        prefix = f"{DECODE}_"
        adapters = [name.removeprefix(prefix) for name in functions if name.startswith(prefix)]
        names = [f"{function}_{a}" for a in adapters for function in (PREFILL, DECODE)]
        lengths = [
            _check_function(path, name, functions, config) for name in (PREFILL, DECODE, *names)
        ]
        if len({*lengths[::2]}) > 1:
            _fail(path, "its functions of adapters take other lengths than prefill")
        _check_weights(path, model.parent, spec)
        return cls(path, config, arrangement, lengths[0], tuple(adapters))

    def function_names(self, adapter: str | None = None) -> tuple[str, str]:
        """Return the names of the functions `prefill` and `decode`, with an adapter or without.

        Raises:
            AFMError: if the package has no functions of that adapter.
        """
        if adapter is None:
            return PREFILL, DECODE
        if adapter not in self.adapters:
            raise AFMError(
                f"{self.path} has no adapter {shown(adapter)}{did_you_mean(adapter, self.adapters)}; it has "
                f"{shown(list(self.adapters))}. Adapters are taken along from the folder adapters of the model."
            )
        return f"{PREFILL}_{adapter}", f"{DECODE}_{adapter}"


def _fail(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}. Create it again with afm-mlx convert --to coreml.")


# -- files


def _model_file(path: Path) -> Path:
    """Return the model's file, which the package's manifest names."""
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        what = "has no Manifest.json" if path.is_dir() else "is no folder"
        raise CheckpointError(
            f"{path} {what}; a Core ML package is a folder NAME.mlpackage. Make one with afm-mlx convert --to "
            "coreml."
        )
    try:
        values = json.loads(read_file(manifest, _MANIFEST_BYTES))
        place = values["itemInfoEntries"][values["rootModelIdentifier"]]["path"]
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"its Manifest.json is no JSON: {named(str(error))}") from None
    except (KeyError, TypeError, IndexError):
        raise _unreadable(path, "its Manifest.json names no root model") from None
    return path / "Data" / _inside(path, place)


def _inside(path: Path, place: Any) -> str:
    """Return `place`, a path relative to the package; raise `CheckpointError` if it leads out of it."""
    parts = PurePosixPath(place).parts if isinstance(place, str) else ()
    if not parts or {"/", "//", ".."} & {*parts} or len(place) > _PATH or not place.isprintable():
        raise _unreadable(path, f"it names the file {shown(place)}, which is no path inside it")
    return place


def _unreadable(path: Path, reason: Exception | str) -> CheckpointError:
    what = " ".join((reason if isinstance(reason, str) else reason_of(reason)).split())
    return CheckpointError(f"{path} can't be read: {what}. Copy or make it again.")


def _read_spec(path: Path, model: Path) -> Any:
    coremltools = import_coremltools()
    from google.protobuf.message import DecodeError

    spec = coremltools.proto.Model_pb2.Model()
    try:
        spec.ParseFromString(read_file(model, _MODEL_BYTES))
    except (OSError, ValueError, DecodeError) as error:
        raise _unreadable(path, error) from error
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise CheckpointError(f"{path} holds a model of the kind {kind}; mlProgram is needed.")
    return spec


def _check_weights(path: Path, folder: Path, spec: Any) -> None:
    """Raise `CheckpointError` unless the package's files hold all arrays of its functions."""
    blobs = {
        (value.blobFileValue.fileName, value.blobFileValue.offset)
        for function in spec.mlProgram.functions.values()
        for block in function.block_specializations.values()
        for operation in _operations(block)
        for value in operation.attributes.values()
        if value.WhichOneof("value") == "blobFileValue"
    }
    for name, offset in sorted(blobs):
        check_blob(folder / _inside(path, name.removeprefix("@model_path/")), offset)


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


# -- functions


def _check_function(
    path: Path, name: str, functions: Mapping[str, Any], config: ModelConfig
) -> tuple[int, ...]:
    """Compare a function's shapes with the architecture; returns its numbers of tokens, ascending."""
    if name not in functions:
        _fail(path, f"it has no function {named(name)}")
    function = functions[name]
    inputs, states = ([part.name for part in parts] for parts in (function.input, function.state))
    if (sorted(inputs), sorted(states)) != (_INPUTS, _STATES):
        _fail(
            path,
            f"{named(name)} takes {shown(sorted(inputs))} and has the states {shown(sorted(states))}; needed "
            f"are {_INPUTS} and {_STATES}",
        )
    kinds = {part.name: part.type.multiArrayType for part in function.input}
    found = {part.name: part.type.multiArrayType.shape for part in function.output}
    found |= {state.name: state.type.stateType.arrayType.shape for state in function.state}
    found |= {"position": kinds["position"].shape}
    kv = [config.num_kv_layers, config.num_kv_heads, config.context_length, config.head_dim]
    needed = {"position": [1], "keys": kv, "values": kv}
    needed |= {"logits": [1, config.vocab_size]} if name.startswith(DECODE) else {_END: [1]}
    for part, shape in needed.items():
        if (given := list(found.get(part, []))) != shape:
            _fail(
                path, f"{part} of {named(name)} is {shown(given)}, and its afm_config means {shape}"
            )
    tokens = kinds["tokens"]
    shapes = [list(entry.shape) for entry in tokens.enumeratedShapes.shapes] or [list(tokens.shape)]
    most = 1 if name.startswith(DECODE) else config.context_length
    for shape in shapes:
        if len(shape) != 2 or shape[0] != 1 or not 1 <= shape[1] <= most:
            _fail(
                path,
                f"{named(name)} takes tokens of the shape {shown(shape)}; needed is [1, L] with L from 1 to "
                f"{most}",
            )
    return tuple(sorted({shape[1] for shape in shapes}))
