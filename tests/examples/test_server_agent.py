"""examples/server/agent.py as it stands, on the real server."""

import runpy
import sys

from tests.tools.server import running_server


def test_the_agent_calls_its_tools_and_answers(monkeypatch, capsys):
    with running_server(kv="float") as server:
        questions = ["Track order L5526.", "Price of the Black Desk, please."]
        words = ["agent.py", "--url", f"{server.url}/v1", *questions]
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
