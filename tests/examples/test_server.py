"""The launchd property list starts the command line's server with the YAML file next to it."""

import plistlib
from pathlib import Path

from afm_mlx.cli import server
from afm_mlx.cli.arguments import parse

FOLDER = Path(__file__).parent.parent.parent / "examples" / "server"


def test_launchd_starts_the_server():
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
