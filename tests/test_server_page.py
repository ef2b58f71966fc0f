"""The tables of the server's two pages; their blocks run in `test_documents.py`."""

import re
import shutil
from pathlib import Path

import pytest

from afm_mlx.cli import server as command
from afm_mlx.cli.arguments import Unavailable, parse
from afm_mlx.loading.resolve import resolve_model
from tests.tools import field_tables
from tests.tools.arguments import actions_of
from tests.tools.server import running_server

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "server.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def section(title):
    return (PAGE + OPERATIONS).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title):
    rows = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "my-adapters"
    shutil.copytree(resolve_model("afm-nano") / "adapters" / "redact", folder / "tidy")
    with running_server(adapter_folders=(folder,)) as running:
        yield running


def test_the_tables_are_whole(server):
    paths = {route.path for route in server.app.routes}
    named = {n.split()[-1] for cells in table("Routes") for n in names_in(cells[0])}
    places = {
        "models/ID": "models/{model_id:path}",
        "responses/ID": "responses/{id}",
        "NAME": "{name}",
    }
    for word, place in places.items():
        named = {path.replace(word, place) for path in named}
    for path in named - {"unload", "pin", "unpin"}:
        assert path.replace("/load", "/{action}") in paths, path
    defaults = {f"--{a.dest.replace('_', '-')}": a.default for a in actions_of(command)}
    for flags, default, _ in table("Limits") + table("Timeouts"):
        (flag,) = names_in(flags)
        value = defaults[flag]
        if value is None:
            assert default in ("none", "the model's context")
        else:
            assert default == ("off" if value is False else f"{value:.0f}")
    metrics = server.http().get("/metrics").text
    for cells in table("Metrics"):
        for name in names_in(cells[0]):
            assert f"# HELP afm_mlx:{name} " in metrics, name


def test_the_tables_of_fields_are_the_servers_own():
    assert field_tables.written(PAGE) == PAGE, "write it with python -m tests.tools.field_tables"


def test_the_example_has_every_setting():
    folder = ROOT / "examples" / "server"
    text = (folder / "server.yaml").read_text()
    named = set(re.findall(r"^(\w+):", text, re.M))
    hidden = {"config", "debug", "help"}
    known = {a.dest for a in actions_of(command) if not isinstance(a, Unavailable)} - hidden
    assert named == known
    given = vars(parse("server", command, ["-c", str(folder / "server.yaml")]))
    plain = vars(parse("server", command, []))
    for name in known:
        assert given[name] == plain[name], name
