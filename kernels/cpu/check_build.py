"""Whether a freshly built extension works with this interpreter's MLX; run by the build.

Prints nothing and exits with 0, or prints in one line why not. MLX's types are only seen by a module whose
nanobind has the same internal version as MLX's own: with another one it builds, imports, and then refuses
every array.
"""

import ctypes
import importlib.util
import sys


def nanobind_internals() -> list[str]:
    """Versions of nanobind's internals that modules of this process have brought for MLX's types."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    # A borrowed reference, which `py_object` as the result's type would count as its own.
    address = ctypes.c_void_p(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()))
    keys = ctypes.cast(address, ctypes.py_object).value
    return [k for k in map(str, keys) if k.startswith("__nb_internals_") and k.endswith("mlx__")]


def problem(path: str) -> str | None:
    """Why the extension at `path` can't be used, or None."""
    import mlx.core as mx

    wanted = set(nanobind_internals())
    spec = importlib.util.spec_from_file_location("_afm_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.probe(mx.zeros(3)) == 3:
            return None
    except ImportError as error:
        return f"it was built, but can't be loaded: {error}"
    except TypeError:
        pass
    found = ", ".join(sorted(set(nanobind_internals()) - wanted)) or "no types of MLX"
    return (
        f"nanobind {module.nanobind_version} has other internals ({found}) than the one that MLX "
        f"{mx.__version__} was built with ({', '.join(sorted(wanted)) or 'unknown'}); build with the "
        "nanobind that afm-mlx's pyproject.toml names under [build-system]"
    )


if __name__ == "__main__":
    if reason := problem(sys.argv[1]):
        print(reason)
        sys.exit(1)
