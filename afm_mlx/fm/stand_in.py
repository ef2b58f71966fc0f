"""Scripts that import `apple_fm_sdk` run on this package instead."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module

NAME = "apple_fm_sdk"
# The SDK's modules whose contents are in a module of another name here.
_MERGED = {
    "generable_utils": "generable",
    "generation_guide": "generation_schema",
    "generation_property": "generation_schema",
}


def stand_in() -> None:
    """Have `import apple_fm_sdk`, and imports of its submodules, give this package and its modules.

    Raises:
        RuntimeError: when another `apple_fm_sdk` was imported before.
    """
    from afm_mlx import fm

    if sys.modules.get(NAME, fm) is not fm:
        raise RuntimeError(
            f"{NAME} was imported before this package could stand in for it. Call stand_in() first."
        )
    sys.modules[NAME] = fm
    for module in pkgutil.iter_modules(fm.__path__):
        # All of them at once: Python would load a file a second time, under the other name.
        if not module.name.startswith("_"):
            sys.modules[f"{NAME}.{module.name}"] = import_module(f"{fm.__name__}.{module.name}")
    for name, here in _MERGED.items():
        sys.modules[f"{NAME}.{name}"] = sys.modules[f"{NAME}.{here}"]
        setattr(fm, name, sys.modules[f"{NAME}.{here}"])  # for `import apple_fm_sdk.NAME as ...`
