"""Without the part of coremltools that writes weights, no package can be made."""

import pytest

pytest.importorskip("coremltools.libmilstoragepython", reason="pip install '.[coreml]'")
