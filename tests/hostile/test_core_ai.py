"""Damaged and hostile Core AI bundles and their adapters: each is described rightly, or is one error.

Apple's runtime can end the process on a program that was changed. So a program is compared with its checksums
before the runtime sees it; what was made to have the right ones runs in a process of its own.
"""

import contextlib
import copy
import hashlib
import json
import shutil

import numpy as np
import pytest

from afm_mlx.coreai.adapter_file import read_adapter_arrays
from afm_mlx.coreai.bundle import (
    FACTS,
    PROGRAM,
    CoreAIBundle,
    ZooConfig,
    adapter_inputs,
    program_facts,
)
from afm_mlx.errors import AFMError
from afm_mlx.measure.coreai_report import examine_coreai
from afm_mlx.measure.exported_models import ERROR_BOUND
from tests.hostile.file_mutations import (
    change_inside,
    changed_bytes,
    changed_json,
    changed_safetensors,
    pick,
    read_safetensors,
    some_value,
)
from tests.hostile.folders import replaced
from tests.hostile.harness import Case, run_cases
from tests.hostile.test_core_ml import PATHS
from tests.hostile.test_special_files import KINDS
from tests.hostile.test_special_files import replaced as replaced_by_kind
from tests.tools.coreai import make_bundle
from tests.tools.tokenizers import train_tiny_spm

pytest.importorskip("coreai.runtime", reason="pip install '.[coreai]'")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("coreai")
    spm = train_tiny_spm(place / "tokenizer.model", "bpe")
    return make_bundle(place, spm, np.random.default_rng(0))


def check_described(path):
    """Sizes that were changed in both places are another model's; the functions say so once they are loaded."""
    bundle = CoreAIBundle.read(path)
    assert bundle.asset.parent == path
    assert all(0 < n <= bundle.config.context_length for n in bundle.prompt_lengths)
    assert min(bundle.state_shape()) > 0
    assert bundle.adapter_rank is None or bundle.adapter_rank > 0
    assert all(name.isascii() and name.isprintable() for name in bundle.adapters)
    assert bundle.dtype in ("float16", "float32")


def test_changed_bundles_are_described_rightly_or_give_one_error(rng, made):
    path = made.bundle
    metadata, asset = path / "metadata.json", path / "tiny.aimodel"
    of_asset, program, checksum = (
        asset / name for name in ("metadata.json", "main.mlirb", "main.hash")
    )

    def generate(rng):
        kind = rng.random()
        contents = {}
        if kind < 0.2:
            file = pick(rng, [metadata, of_asset])
            contents[file] = changed_json(rng, json.loads(file.read_text()))
        elif kind < 0.3:
            values = json.loads(metadata.read_text())
            values["assets"]["main"] = pick(rng, [*PATHS, "../tiny.aimodel", "/tmp/x.aimodel"])
            contents[metadata] = json.dumps(values)
        elif kind < 0.75:
            contents = _changed_facts(rng, metadata, of_asset)
        else:
            file = pick(rng, [program, program, checksum, metadata, of_asset])
            contents[file] = changed_bytes(rng, file.read_bytes())
            if file == program and rng.random() < 0.5:
                contents[checksum] = hashlib.sha256(contents[program]).digest()
        contents = {
            file: content if isinstance(content, bytes) else content.encode(errors="replace")
            for file, content in contents.items()
        }
        same = all(content == file.read_bytes() for file, content in contents.items())

        def run():
            with contextlib.ExitStack() as stack:
                for file, content in contents.items():
                    stack.enter_context(replaced(file, content))
                check_described(path)
                assert same or not {program, checksum} & set(contents)

        what = {file.name: content[:700] for file, content in contents.items()}
        return Case(f"{what}", run)

    run_cases(generate, rng, 0.06)


def _changed_facts(rng, metadata, of_asset):
    """Our facts changed, in one file or in both, or the program's size and checksum."""
    values = {file: json.loads(file.read_text()) for file in (metadata, of_asset)}
    holders = [values[metadata]["user_data"], values[of_asset]["creatorDefinedMetadata"]]
    facts = json.loads(holders[0][FACTS])
    if rng.random() < 0.2:
        holders[0][PROGRAM] = pick(rng, ["[" * 10_000, some_value(rng), '{"bytes": -1}'])
    else:
        if rng.random() < 0.3:
            facts["config"] = ZooConfig(300, 40, 32, 2, 4, 2, 8, 1e-5).to_dict()
        change_inside(rng, pick(rng, [facts, facts["config"]]))
    with contextlib.suppress(ValueError):  # numbers of more digits than Python writes
        text = json.dumps(facts)
        for holder in holders if rng.random() < 0.7 else [pick(rng, holders)]:
            holder[FACTS] = text
    return {file: json.dumps(content) for file, content in values.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_special_files(made, kind):
    """Pipes, devices, loops of links and files of any size, in the place of each file."""
    path, right = made.bundle, CoreAIBundle.read(made.bundle)
    files = [path / "metadata.json", *sorted((path / "tiny.aimodel").iterdir()), made.adapter]
    for file in files:
        with replaced_by_kind(file, kind), pytest.raises(AFMError) as raised:
            CoreAIBundle.read(path)
            read_adapter_arrays(made.adapter, right)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_program_without_an_end_whose_size_and_checksum_are_stated(made, kind):
    """A pipe or a device has the size 0: with that in the metadata it must not be read either."""
    metadata, asset = made.bundle / "metadata.json", made.bundle / "tiny.aimodel"
    values = json.loads(metadata.read_text())
    with replaced_by_kind(asset / "main.mlirb", kind):
        values["user_data"][PROGRAM] = program_facts(asset)
        content, words = json.dumps(values).encode(), "main.mlirb is no regular file"
        with replaced(metadata, content), pytest.raises(AFMError, match=words):
            CoreAIBundle.read(made.bundle)


def test_changed_adapters_are_right_or_give_one_error(rng, made, tmp_path):
    bundle, file = CoreAIBundle.read(made.bundle), tmp_path / "a.safetensors"
    shutil.copy(made.adapter, file)
    header, data = read_safetensors(file)
    shapes = dict(adapter_inputs(bundle.config, bundle.adapter_rank))

    def generate(rng):
        changed = copy.deepcopy(header)
        if rng.random() < 0.1:
            changed["__metadata__"][pick(rng, list(changed["__metadata__"]))] = some_value(rng)
        content = changed_safetensors(rng, changed, data)

        def run():
            with replaced(file, content):
                arrays = read_adapter_arrays(file, bundle)
            assert {name: array.shape for name, array in arrays.items()} == shapes
            assert all(np.isfinite(array).all() for array in arrays.values())
            assert {array.dtype.name for array in arrays.values()} == {bundle.dtype}

        return Case(f"{content[:1500]!r}", run)

    run_cases(generate, rng, 0.06)


def test_programs_that_were_made_to_pass_run_in_a_process_of_their_own(rng, made):
    """With the right checksums everywhere: the report says that the process ended, or what differs."""
    metadata, asset = made.bundle / "metadata.json", made.bundle / "tiny.aimodel"
    program, checksum = asset / "main.mlirb", asset / "main.hash"

    def generate(rng):
        content = changed_bytes(rng, program.read_bytes())

        def run():
            values = json.loads(metadata.read_text())
            with contextlib.ExitStack() as stack:
                stack.enter_context(replaced(program, content))
                stack.enter_context(replaced(checksum, hashlib.sha256(content).digest()))
                values["user_data"][PROGRAM] = program_facts(asset)
                stack.enter_context(replaced(metadata, json.dumps(values).encode()))
                report = examine_coreai(made.bundle, made.folder, quick=True, seed=1)
            found = report["runs"][1]
            assert found["failure"] or found["error"] <= ERROR_BOUND

        return Case(f"{len(content)} bytes: {content[:300]!r}", run)

    run_cases(generate, rng, 0.0005)
