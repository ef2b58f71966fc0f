"""What the tests of Apple's SDK find as their conftest: `apple_fm_sdk` is this project's package."""

import asyncio
import inspect
import json
from pathlib import Path

import pytest

from afm_mlx.fm.__main__ import stand_in

stand_in()

import apple_fm_sdk as fm  # noqa: E402  what it is was just said


def pytest_configure(config):
    for marker in ("asyncio", "timeout(seconds)"):
        config.addinivalue_line("markers", f"{marker}: of plugins that are not needed here")
    from tester_schemas import schemas

    names = {"PetClub": "petClub", "ShelterNewsletter": "newsletter"}
    for name, made in vars(schemas).items():
        if isinstance(made, type) and isinstance(made, fm.Generable):
            path = (
                Path(__file__).parent / "tester_schemas" / f"{names.get(name, name.lower())}.json"
            )
            path.write_text(json.dumps(made.generation_schema().to_dict()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def model():
    made = fm.SystemLanguageModel()
    is_available, reason = made.is_available()
    if not is_available:
        pytest.skip(f"there is no model: {reason}")
    return made


@pytest.fixture
def session(model):
    return fm.LanguageModelSession("You are a helpful assistant.", model=model)


def assert_schema_properties(schema, title, names):
    """The schema of a class has its name and its fields, in their order."""
    made = schema.to_dict()
    assert made["title"] == title
    assert made["x-order"] == names
    assert set(made["properties"]) == set(names)
