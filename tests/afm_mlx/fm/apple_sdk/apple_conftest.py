"""What the tests of Apple's SDK find as their conftest: `apple_fm_sdk` is this project's package."""

import asyncio
import inspect
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image

from afm_mlx.fm.__main__ import stand_in
from afm_mlx.loading.load import load
from afm_mlx.vision.vision import Vision
from afm_mlx.vision_config import AdaptorConfig, VisionConfig

stand_in()

import apple_fm_sdk as fm  # noqa: E402  what it is was just said


def pytest_configure(config):
    for marker in ("asyncio", "timeout(seconds)"):
        config.addinivalue_line("markers", f"{marker}: of plugins that are not needed here")
    resources = Path(__file__).parent / "resources"
    resources.mkdir(exist_ok=True)
    for name, size in (("test-simple-image.jpeg", 24), ("test-text-dense-image.png", 90)):
        Image.effect_noise((size, size), 60).save(resources / name)
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


@lru_cache
def seeing():
    """The embedded model with a tiny random vision part, and its tokenizer."""
    model, tokenizer = load()
    adaptor = AdaptorConfig(num_heads=2, mlp_dim=64, pool_grid=4, rapid_pool_grid=2)
    config = VisionConfig(
        image_token_id=tokenizer.pad_token_id,
        image_size=84,
        rapid_size=28,
        position_size=56,
        patch_size=4,
        hidden_dim=32,
        num_layers=3,
        num_heads=2,
        mlp_dim=64,
        window_size=7,
        global_layers=(2,),
        adaptor=adaptor,
    )
    model.args = replace(model.args, vision_config=config)
    mx.random.seed(0)
    model.vision = Vision(config, model.args.hidden_dim)
    # What is seen has next to no weight, so that answers end whatever the random numbers are.
    model.vision.adaptor.conv.weight = 1e-6 * model.vision.adaptor.conv.weight
    mx.eval(model.vision.parameters())
    tokenizer.vision_config = config
    return model.eval(), tokenizer


@pytest.fixture
def model(request):
    sees = request.module.__name__.endswith("test_image_prompts")
    made = fm.SystemLanguageModel(model=seeing() if sees else None)
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
