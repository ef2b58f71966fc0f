"""Without Apple's coreai-core, no bundle can be made or run."""

import pytest

pytest.importorskip(
    "coreai.runtime", reason="coreai-core has wheels for Linux on x86-64 and macOS 26"
)
