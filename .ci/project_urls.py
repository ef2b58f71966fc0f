"""Add `[project.urls]` to pyproject.toml, for a wheel or an sdist that is built from a repository.

    python .ci/project_urls.py https://github.com/OWNER/NAME

The addresses are the repository's that builds a release, so a fork's packages never send their users elsewhere.
"""

import sys
from pathlib import Path

URLS = """
[project.urls]
Homepage = "{home}"
Documentation = "{home}/tree/main/docs"
Source = "{home}"
Issues = "{home}/issues"
Changelog = "{home}/blob/main/CHANGELOG.md"
"""


def with_urls(project: str, home: str) -> str:
    """Return the text of a pyproject.toml with the URLs of a repository.

    Args:
        project: text of a pyproject.toml without `[project.urls]`.
        home: URL of the repository.
    """
    return project + URLS.format(home=home)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: project_urls.py URL_OF_THE_REPOSITORY")
    file = Path("pyproject.toml")
    file.write_text(
        with_urls(file.read_text(encoding="utf-8"), sys.argv[1].rstrip("/")), encoding="utf-8"
    )
