"""Adapters converted from one format to another, described, and verified.

An adapter may hold the fingerprint of its base model. If an AFM model's folder is named, the two fingerprints
must be equal, and an adapter without one gets the folder's.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, AdapterConfig
from afm_mlx.adapters.formats import (
    PackageMetadata,
    detect_format,
    misfits,
    read_adapter,
    read_metadata,
    write_adapter,
)
from afm_mlx.adapters.formats.fmadapter import SUFFIX
from afm_mlx.adapters.formats.pair_order import (
    Architecture,
    Tensors,
    exact_alpha,
    keys_of,
    layer_of,
    pair_targets,
)
from afm_mlx.adapters.resident import check_base, check_fingerprint
from afm_mlx.adapters.reward_head import load_reward_head
from afm_mlx.adapters.target_modules import zoo_base
from afm_mlx.adapters.task_mask import (
    MASK_CONFIG_NAME,
    MASK_NAME,
    has_mask,
    is_mask_alone,
    read_mask,
    write_mask,
)
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.finite import not_finite
from afm_mlx.config import ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import AFMError, CheckpointError, named
from afm_mlx.json_values import FLOAT16_MAX, is_text
from afm_mlx.loading.mlx_lm_models import open_mlx_lm_model, read_model
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model


@dataclasses.dataclass(frozen=True)
class BaseFolder:
    """Architecture and fingerprint of a base model.

    Adapters of mlx-lm's models have no fingerprint, only their task masks: `fingerprint` is None for such a
    model, and `zoo_folder` is its folder.
    """

    config: Architecture
    fingerprint: str | None
    zoo_folder: Path | None = None

    @classmethod
    def read(cls, folder: Path) -> BaseFolder:
        """Read a model's folder; no weights are loaded."""
        source = folder / "config.json"
        values = read_config_json(source)
        if not is_afm_config(values) and is_text(values.get("model_type")):
            return cls(zoo_base(open_mlx_lm_model(folder)[0]), None, folder)
        config = ModelConfig.from_dict(values, source=str(source))
        return cls(config, folder_fingerprint(config, folder))

    @property
    def known(self) -> set[str] | None:
        """Fingerprints that an adapter may name; None accepts any adapter."""
        return None if self.fingerprint is None else {self.fingerprint}

    def mask_fingerprints(self) -> set[str] | None:
        """Return the fingerprints that a task mask may name; reads the weights of a model of mlx-lm."""
        if self.zoo_folder is None:
            return self.known
        model, _ = open_mlx_lm_model(self.zoo_folder)
        read_model(model, self.zoo_folder)
        return {base_model_fingerprint(model)}


def base_of(adapter: Path) -> BaseFolder | None:
    """Return the base model of an mlx-lm or PEFT adapter if it is on this machine, else None.

    It is the model that the adapter's config names, a folder or the embedded model; or else the embedded model
    if the fingerprint is its own. The config may have been made elsewhere: an unknown name is
    ignored, and nothing is downloaded.
    """
    path = adapter / CONFIG_NAME
    if not path.is_file():
        return None
    values = read_config_json(path)
    name: Any = values.get("base_model_name_or_path" if "peft_type" in values else "model")
    folder = None
    try:
        if is_text(name) and (name == EMBEDDED_MODEL or Path(os.path.expanduser(name)).is_dir()):
            found = resolve_model(name)
            if (found / "config.json").is_file():
                folder = found
    except (OSError, ValueError):  # no config, or a name that no file can have
        pass
    if folder is not None:
        return BaseFolder.read(folder)
    embedded = BaseFolder.read(resolve_model(EMBEDDED_MODEL))
    return embedded if values.get("base_model_fingerprint") == embedded.fingerprint else None


def read_for(
    source: str | Path,
    base: BaseFolder | None,
    *,
    alpha: float | None = None,
    force: bool = False,
    keeps_mask: bool = False,
) -> tuple[Tensors, AdapterConfig]:
    """Read an adapter, and check that it was made for the base model if there is one; see `read_adapter`.

    An adapter without a fingerprint gets the base model's. `force` accepts another fingerprint, which is kept.

    Raises:
        CheckpointError: for an adapter of another model; shows both fingerprints. For an adapter with a task
            mask, unless the caller `keeps_mask`.
    """
    if has_mask(source) and not keeps_mask:
        raise CheckpointError(
            f"{source} has a task mask, which only a folder of mlx-lm's format keeps. Convert it to mlx-lm, or "
            f"take {MASK_NAME} and {MASK_CONFIG_NAME} out of a copy of the folder."
        )
    tensors, config = read_adapter(source, base.config if base else None, alpha=alpha)
    if base is not None and not force:
        check_fingerprint(config, base.known, source)
    if base is not None and config.base_model_fingerprint is None:
        config = dataclasses.replace(config, base_model_fingerprint=base.fingerprint)
    return tensors, config


def convert_adapter(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    base: BaseFolder | None = None,
    alpha: float | None = None,
    dtype: mx.Dtype | None = None,
    package: Mapping[str, Any] | None = None,
    any_rank: bool = False,
    qkv: str = "fused",
    force: bool = False,
) -> AdapterConfig:
    """Convert an adapter to another format, or to the same one; return its config.

    For arguments see `read_for`, `write_adapter`, and `package_metadata` (`package` has its `fields`). A reward
    head, which only mlx-lm's folders hold, is copied.

    Raises:
        AFMError: if the source can't be read or can't be converted with these options.
    """
    output = Path(output)
    if package and to != "fmadapter":
        raise AFMError(
            f"{', '.join(package)} belong to .fmadapter packages; {to} has no such fields."
        )
    keeps_mask = to == "mlx-lm"
    tensors, config = read_for(source, base, alpha=alpha, force=force, keeps_mask=keeps_mask)
    mask = read_mask(source) if has_mask(source) else None
    head = None if config.reward is None else load_reward_head(source, config)
    if head is not None and to != "mlx-lm":
        raise AFMError(
            f"{source} is a reward adapter, and {to} has no place for its reward head. Convert it to mlx-lm."
        )
    write_adapter(
        output,
        tensors,
        config,
        to,
        model_config=base.config if base else None,
        head=head,
        dtype=dtype,
        package=package_metadata(output, to, source, package or {}),
        any_rank=any_rank,
        qkv=qkv,
    )
    if mask is not None:
        write_mask(output, mask)
    return config


def package_metadata(
    output: Path, to: str, source: str | Path | None, fields: Mapping[str, Any]
) -> PackageMetadata | None:
    """Return an `.fmadapter` package's metadata, the source's overridden by `fields`; None for other formats.

    The name of `output` is the default identifier. A `draft` of None drops the draft model of the source.
    """
    if to != "fmadapter":
        return None
    metadata = PackageMetadata(output.name.removesuffix(SUFFIX))
    if source is not None and detect_format(source) == "fmadapter":
        metadata, _ = read_metadata(Path(source))
    return dataclasses.replace(metadata, **fields)


def stored_bytes(path: str | Path) -> int:
    path = Path(path)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def describe_adapter(
    path: str | Path, base: BaseFolder | None = None, alpha: float | None = None
) -> dict[str, Any]:
    """Return the properties of an adapter or a task mask, as JSON values; its numbers are not checked."""
    if is_mask_alone(path):
        return _mask_facts(path)
    tensors, config = read_adapter(path, base.config if base else None, alpha=alpha, finite=False)
    facts = _facts(path, tensors, config)
    return facts | {"mask": _mask_facts(path)["mask"]} if has_mask(path) else facts


def _facts(path: str | Path, tensors: Tensors, config: AdapterConfig) -> dict[str, Any]:
    layers = {layer_of(name) for name in tensors}
    types = {str(tensor.dtype).removeprefix("mlx.core.") for tensor in tensors.values()}
    facts: dict[str, Any] = {
        "adapter": str(path),
        "format": detect_format(path),
        "rank": config.rank,
        "alpha": exact_alpha(config.rank, config.scale),
        "scale": config.scale,
        "dropout": config.dropout,
        "blocks": len({layer.rsplit(".", 2)[0] for layer in layers}),
        "layers": len(layers),
        "pairs": len(tensors) // 2,
        "keys": list(keys_of(tensors)),
        "parameters": sum(tensor.size for tensor in tensors.values()),
        "bytes": stored_bytes(path),
        "stored_as": sorted(types),
        "base_model_fingerprint": config.base_model_fingerprint,
    }
    if config.reward is not None:
        facts["reward"] = {"grades": list(config.reward.grades)}
    if facts["format"] == "fmadapter":
        metadata, _ = read_metadata(Path(path))
        names = "name author description license base_signature draft_token_count".split()
        facts["package"] = {name: getattr(metadata, name) for name in names}
        facts["package"]["draft_model"] = metadata.draft is not None
    return facts


def _mask_facts(path: str | Path) -> dict[str, Any]:
    """Return the properties of a folder's task mask, by the names of an adapter's."""
    mask = read_mask(path)
    return {
        "adapter": str(path),
        "format": "mask",
        "rank": 0,
        "bytes": stored_bytes(path),
        "base_model_fingerprint": mask.base_model_fingerprint,
        "mask": {
            "kept_share": round(mask.share, 6),
            "least_kept_channels": min(mask.widths),
            "most_kept_channels": max(mask.widths),
            "ffn_dim": mask.ffn_dim,
            "group": mask.group,
            "blocks": mask.blocks,
            "task": mask.task,
            "criterion": mask.criterion,
            "fingerprint": mask.fingerprint,
        },
    }


def _mask_problems(path: str | Path, base: BaseFolder | None) -> list[str]:
    """Return why a folder's task mask can't be used, a sentence for each problem."""
    problems = []
    try:
        mask = read_mask(path)
        if base is None:
            return []
        if mask.base_model_fingerprint is not None:
            check_base(mask.base_model_fingerprint, base.mask_fingerprints(), path, "task mask")
    except AFMError as error:
        problems.append(str(error))
    else:
        gates = [t for t in pair_targets(base.config) if t.layer.endswith(".gate_proj")]
        if (mask.blocks, {mask.ffn_dim}) != (len(gates), {t.outputs for t in gates}):
            widths = ", ".join(map(str, sorted({t.outputs for t in gates}))) or "no"
            problems.append(
                f"the mask is for {mask.blocks} blocks of {mask.ffn_dim} channels, and the model has "
                f"{len(gates)} of {widths}"
            )
    return problems


def _signature_problems(package: Mapping[str, Any] | None, wanted: str | None) -> list[str]:
    """Return why a package's facts, None for other formats, lack the wanted base signature."""
    if wanted is None:
        return []
    if package is None:
        return ["only .fmadapter packages have a base signature, and this is none"]
    found = package["base_signature"]
    if found == wanted:
        return []
    return [f"the package is for the base signature {named(found)}, not {named(wanted)}"]


@dataclasses.dataclass
class AdapterReport:
    """Problems of an adapter, a sentence for each, and its properties.

    `notes` has oddities that do no harm, and checks that were left out. `facts` is None if nothing can be read.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] | None = None


_NO_BASE = "no model was named: shapes and fingerprint were not compared with one"


def verify_adapter(
    path: str | Path,
    base: BaseFolder | None = None,
    *,
    alpha: float | None = None,
    base_signature: str | None = None,
) -> AdapterReport:
    """Find every problem that keeps an adapter of any format from being used.

    Names and shapes of all tensors, and the fingerprint, must fit `base`; an `.fmadapter` package must have
    `base_signature`. For `alpha`, see `read_adapter`.
    """
    report, mask_facts = AdapterReport(), None
    if has_mask(path):
        report.problems += _mask_problems(path, base)
        mask_facts = None if report.problems else _mask_facts(path)
        if is_mask_alone(path):
            report.facts = mask_facts
            report.problems += _signature_problems(None, base_signature)
            if base is None:
                report.notes.append(_NO_BASE)
            return report
    try:
        # The blobs of a package have no names: their order follows the model's layers.
        architecture = base.config if base else None
        if isinstance(architecture, ModelConfig) and detect_format(path) != "fmadapter":
            architecture = None
        tensors, config = read_adapter(path, architecture, alpha=alpha, finite=False)
        report.facts = _facts(path, tensors, config)
        if mask_facts is not None:
            report.facts["mask"] = mask_facts["mask"]
    except AFMError as error:
        report.problems.append(str(error))
        return report
    if config.reward is not None:
        try:
            load_reward_head(path, config)
        except AFMError as error:
            report.problems.append(str(error))
    if base is None:
        report.notes.append(_NO_BASE)
    else:
        report.problems += misfits(tensors, base.config)
        if base.known and config.base_model_fingerprint is None:
            report.notes.append("the adapter has no fingerprint of its base model")
        try:
            check_fingerprint(config, base.known, path)
        except CheckpointError as error:
            report.problems.append(str(error))
    if report.facts["format"] == "toolkit":
        with zipfile.ZipFile(path) as archive:  # readers of .pt files don't compare checksums
            try:
                damaged = archive.testzip()
            except (zipfile.BadZipFile, OSError) as error:
                damaged = str(error)
        if damaged is not None:
            report.problems.append(f"its checksums do not fit ({damaged}): the file is damaged")
    report.problems += _signature_problems(report.facts.get("package"), base_signature)
    bad = set(not_finite(tensors))
    report.problems += [f"{named(name)} holds NaN or infinity" for name in sorted(bad)]
    for name in sorted(set(tensors) - bad):
        high = mx.abs(tensors[name].astype(mx.float32)).max().item()
        if high > FLOAT16_MAX:
            report.problems.append(
                f"{named(name)} has numbers up to {high:g}; adapters run in float16, which ends at "
                f"{FLOAT16_MAX:g}"
            )
    second = [name for name in tensors if ".lora_b" in name]
    zero = sum(name not in bad and not mx.any(tensors[name]).item() for name in second)
    if zero and zero == len(second):
        report.problems.append("every B is zero: the adapter changes nothing")
    elif zero:
        report.notes.append(f"{zero} of {len(second)} pairs change nothing: their B is zero")
    return report
