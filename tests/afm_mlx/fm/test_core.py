"""Models: which one is used, if it is there, who shares it, and how many tokens a value takes."""

import asyncio
import shutil
import warnings
from types import SimpleNamespace

import pytest

from afm_mlx import fm
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from tests.afm_mlx.fm.conftest import nano_adapters
from tests.tools.cases import each

FOLDER = resolve_model(EMBEDDED_MODEL)


def test_the_model_is_the_embedded_one_or_the_environments(monkeypatch, tmp_path):
    model = fm.SystemLanguageModel()
    assert model.is_available() == (True, None)
    assert model.context_size == 1024
    assert model._shared.name == "afm-nano"

    monkeypatch.setenv("AFM_MLX_MODEL", str(tmp_path / "nowhere"))
    missing = fm.SystemLanguageModel()
    not_ready = fm.SystemLanguageModelUnavailableReason.MODEL_NOT_READY
    assert missing.is_available() == (False, not_ready)
    for use in (
        lambda: missing.context_size,
        lambda: asyncio.run(fm.LanguageModelSession(model=missing).respond("Hi")),
        lambda: asyncio.run(missing.token_count("Hi")),
    ):
        with pytest.raises(fm.AssetsUnavailableError, match="nowhere"):
            use()
    # It is found once it is there.
    shutil.copytree(FOLDER, tmp_path / "nowhere")
    assert missing.is_available() == (True, None)
    assert asyncio.run(missing.token_count("Hi")) > 0


async def test_who_names_the_same_model_shares_it(nano):
    one, other = fm.SystemLanguageModel(), fm.SystemLanguageModel(model="afm-nano")
    by_path = fm.SystemLanguageModel(model=FOLDER)
    by_objects = fm.SystemLanguageModel(model=nano)
    assert one._shared is other._shared is not by_path._shared
    assert by_objects._shared is fm.SystemLanguageModel(model=nano)._shared

    await asyncio.gather(one._shared.load(), other._shared.load())
    adapters = [model._shared.engine._made().adapters for model in (one, other)]
    assert adapters[0] is adapters[1]
    assert "todo" in adapters[0].registered  # it comes with the model


def test_use_cases_and_guardrails_are_kept_and_unknown_ones_replaced():
    other = SimpleNamespace(value=999)
    assert [int(reason) for reason in fm.SystemLanguageModelUnavailableReason] == [0, 1, 2, 255]
    tagging = fm.SystemLanguageModelUseCase.CONTENT_TAGGING
    permissive = fm.SystemLanguageModelGuardrails.PERMISSIVE_CONTENT_TRANSFORMATIONS
    model = fm.SystemLanguageModel(tagging, permissive)
    assert (model.use_case, model.guardrails) == (1, 1)
    with pytest.warns(UserWarning, match="GENERAL is used"):
        assert fm.SystemLanguageModel(other).use_case == fm.SystemLanguageModelUseCase.GENERAL


def test_a_use_case_picks_the_adapter_of_its_name(nano):
    tagging = fm.SystemLanguageModelUseCase.CONTENT_TAGGING
    text = "Triage this message:\nWhere is order K482?"

    def answered(model, **how):
        session = fm.LanguageModelSession(model=model, **how)
        answer = asyncio.run(session.respond(text))
        return answer, session.transcript[-1].assets[1:]

    with pytest.warns(UserWarning, match="no adapter 'content_tagging'"):
        plain, used = answered(fm.SystemLanguageModel(tagging, model=FOLDER))
    assert used == []
    adapters = {"content_tagging": nano_adapters()["triage"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fm.SystemLanguageModel(tagging, model=nano, adapters=adapters)
        answer, used = answered(model)
        assert answer.startswith("Priority")
        assert used == ["content_tagging"]
        # What a session or a request says comes first.
        assert answered(model, adapter=None) == (plain, [])
        assert answered(fm.SystemLanguageModel(model=nano)) == (plain, [])


def test_languages_are_those_of_the_model_card(tmp_path, monkeypatch):
    model = fm.SystemLanguageModel()
    assert model.supported_languages == {"en"}
    assert model.supports_locale("en_GB.UTF-8")
    assert not model.supports_locale("de-AT")
    monkeypatch.setattr("afm_mlx.fm.core.getlocale", lambda: ("fr_FR", "UTF-8"))
    assert not model.supports_locale()
    monkeypatch.setattr("afm_mlx.fm.core.getlocale", lambda: (None, None))
    assert model.supports_locale()
    for wrong in ("", "english", "1", 3):
        with pytest.raises(ValueError, match="locale is"):
            model.supports_locale(wrong)
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    for head, languages in (
        ("language: [de, no, zh-Hant]", {"de", "no", "zh"}),
        ("language: it", {"it"}),
        ("license: mit", set()),
        ("language: {", set()),
    ):
        (folder / "README.md").write_text(f"---\n{head}\n---\n# A model\n")
        other = fm.SystemLanguageModel(model=folder)
        assert other.supported_languages == languages
        assert other.supports_locale("zh_TW") == (languages == set() or "zh" in languages)


def test_adapters_are_names_of_folders_or_a_pool(nano, tmp_path):
    folders = nano_adapters()
    model = fm.SystemLanguageModel(model=nano, adapters=folders)
    fm.SystemLanguageModel(model=nano, adapters=folders)
    for adapters, message in (
        ({"todo": folders["triage"]}, "Take another name"),
        ({"new": tmp_path / "nowhere"}, "nowhere"),
    ):
        with pytest.raises(fm.AssetsUnavailableError, match=message):
            fm.SystemLanguageModel(model=nano, adapters=adapters)
    # A name that is given takes the place of the model's own, until the model has been loaded.
    own = fm.SystemLanguageModel(model=FOLDER, adapters={"todo": folders["triage"]})
    with pytest.raises(fm.AssetsUnavailableError, match="triage already"):
        fm.SystemLanguageModel(model=FOLDER, adapters={"todo": folders["todo"]})
    text = "Triage this message:\nWhere is order K482?"
    answer = asyncio.run(fm.LanguageModelSession(model=own, adapter="todo").respond(text))
    assert answer.startswith("Priority")
    with pytest.raises(fm.AssetsUnavailableError, match="redact already"):
        fm.SystemLanguageModel(model=FOLDER, adapters={"redact": folders["todo"]})
    fm.SystemLanguageModel(model=FOLDER, adapters={"new": folders["triage"]})
    same = asyncio.run(fm.LanguageModelSession(model=own, adapter="new").respond(text))
    assert same == answer
    pool = AdapterPool(nano[0])
    pool.register("mine", folders["todo"])
    with pytest.raises(fm.AssetsUnavailableError, match="belongs to one model"):
        fm.SystemLanguageModel(adapters=pool)
    pooled = fm.SystemLanguageModel(model=nano, adapters=pool)
    assert pooled._shared is not model._shared
    answers = [
        asyncio.run(fm.LanguageModelSession(model=m, adapter=name).respond("Buy milk on Monday"))
        for m, name in ((model, "todo"), (pooled, "mine"))
    ]
    assert answers[0] == answers[1]


@fm.generable
class Small:
    name: str


@fm.generable
class Large:
    name: str
    others: list[Small]


def a_tool(name: str) -> str:
    """Find someone"""
    return name


async def test_tokens_are_counted(model):
    count = model.token_count
    tool, other = fm.Tool.from_function(a_tool), fm.Tool.from_function(a_tool)
    rising = [
        [await count(text) for text in ("", "Hi", "Hi there", ["Hi", "there you"])],
        [await count(instructions=text) for text in ("", "Be brief", "Be brief and kind")],
        [await count(tools) for tools in ([], [tool], [tool, other])],
        [await count(each.generation_schema()) for each in (Small, Large)],
    ]
    session = fm.LanguageModelSession(model=model)
    sizes = [await count(session.transcript)]
    for text in ("Hi", "Hi there"):
        await session.respond(text, options=fm.GenerationOptions(maximum_response_tokens=3))
        sizes.append(await count(session.transcript))
        assert sizes[-1] == await session.token_count()
    for counts in [*rising, sizes]:
        assert sorted(set(counts)) == counts
    assert [counts[0] for counts in rising[:3]] == [0, 0, 0]
    assert sizes[0] == 0
    assert await count("Hi 👋 世界") == await count("Hi 👋 世界") > 0
    for arguments in ({}, {"value": "Hi", "instructions": "Hi"}):
        with pytest.raises(ValueError, match="either"):
            await count(**arguments)
    with pytest.raises(fm.PromptError):
        await count(3)


@each("context, wanted", [(64, 64), (None, 2**63 - 1)])
def test_models_of_the_zoo_say_their_context_or_not(nano, context, wanted):
    other = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=context))
    assert fm.SystemLanguageModel(model=(other, nano[1])).context_size == wanted
