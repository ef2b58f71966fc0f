"""Refuse the phrases of `[tool.words]` in pyproject.toml, in all text files or in the files named.

`.ci/lint_words.py [FILE or FOLDER ...]` prints each place with the reason, and exits 1 if there is one.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["words"]


def text_files(names: list[str]) -> list[str]:
    """List the tracked files below `names` (all without one) that hold our own text."""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z", *names], text=True)
    excluded = tuple(CONFIG["exclude"])
    return [
        name
        for name in listed.split("\0")
        if name.endswith(tuple(CONFIG["suffixes"])) and not name.startswith(excluded)
    ]


def main() -> int:
    names = [str(Path(name).resolve().relative_to(ROOT)) for name in sys.argv[1:]]
    refused = [(re.compile(phrase), reason) for phrase, reason in CONFIG["refused"].items()]
    found = 0
    for name in text_files(names):
        path = ROOT / name
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            for phrase, reason in refused:
                if match := phrase.search(line):
                    found += 1
                    print(f"{name}:{number}: {match[0]!r}: {reason}")
    print(f"{found} refused phrases" if found else "words: no refused phrase")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
