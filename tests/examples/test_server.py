"""examples/server: the agent as it stands, on the real server; and the property list for launchd."""

import plistlib
import runpy
import sys
from pathlib import Path

from afm_mlx.cli import server
from afm_mlx.cli.arguments import parse
from tests.tools.server import running_server

FOLDER = Path(__file__).parents[2] / "examples" / "server"


def test_the_agent_calls_its_tools_and_answers(monkeypatch, capsys):
    with running_server(kv="float") as running:
        questions = ["Track order L5526.", "Price of the Black Desk, please."]
        words = ["agent.py", "--url", f"{running.url}/v1", *questions]
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path("examples/server/agent.py", run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "Track order L5526.",
        '    track_order({"order": "L5526"})',
        "Order L5526 is in Hitton and arrives on March 14.",
        "Price of the Black Desk, please.",
        '    check_price({"item": "Black Desk"})',
        "The Black Desk costs 738 dollars at Theater Duwal.",
    ]


def test_launchd_starts_the_server_with_the_file_next_to_it():
    (path,) = FOLDER.glob("*.plist")
    job = plistlib.loads(path.read_bytes())
    assert job["Label"] == path.stem
    program, name, *rest = job["ProgramArguments"]
    assert (Path(program).name, name) == ("afm-mlx", "server")
    here = [str(FOLDER / Path(word).name) if word.endswith(".yaml") else word for word in rest]
    given = parse("server", server, here)
    assert job["ExitTimeOut"] > given.grace
    files = job["SoftResourceLimits"]["NumberOfFiles"]
    assert files >= given.max_connections + 256
