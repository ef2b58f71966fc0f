"""Give MLX on Linux a fast dense matrix product.

MLX's Linux wheel carries Netlib's reference BLAS: 8 GFLOP/s at 512 x 512 x 512 on one core of an AMD EPYC,
where the OpenBLAS inside NumPy's wheel reaches 250 on two. `install` puts a forwarding `cblas_sgemm` in
front, before `mlx.core` is loaded and binds its own. macOS is left alone: MLX uses Accelerate there.

OpenBLAS's own threads spin while they wait for each other, which makes them many times slower next to one busy
process. So once the kernels are loaded, their thread pool computes the tiles of a product, unless OpenBLAS is
limited to one thread; see `kernels/cpu/blas.c`.

The environment variable `AFM_MLX_BLAS=0` switches all of this off.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from pathlib import Path

SWITCH = "AFM_MLX_BLAS"
_SYMBOLS = (
    "scipy_cblas_sgemm64_",
    "scipy_openblas_get_num_threads64_",
    "scipy_openblas_set_num_threads64_",
)

_status = "not installed"


def status() -> str:
    """Return the name of the BLAS for MLX's dense float32 products, with the reason if it is MLX's own."""
    return _status


def install() -> None:
    """Route MLX's float32 matrix products to NumPy's OpenBLAS.

    On other systems than Linux, if switched off, if MLX is already loaded, or if a part is missing, only the
    reason is recorded for `status`.
    """
    global _status
    _status = _install()


def set_threads(threads: int) -> None:
    if (openblas := _numpy_openblas()) is not None:
        ctypes.CDLL(str(openblas)).scipy_openblas_set_num_threads64_(ctypes.c_int(threads))


def _install() -> str:
    if sys.platform != "linux":
        return "MLX's own (Accelerate)" if sys.platform == "darwin" else "MLX's own"
    if os.environ.get(SWITCH) == "0":
        return f"MLX's own (Netlib): switched off by {SWITCH}=0"
    if "mlx.core" in sys.modules:
        return "MLX's own (Netlib): mlx.core was imported before afm_mlx"
    library, openblas = _built_library(), _numpy_openblas()
    if library is None:
        return "MLX's own (Netlib): afm_blas.so is missing; install afm-mlx where there is a C compiler"
    if openblas is None:
        return "MLX's own (Netlib): this NumPy has no OpenBLAS"
    try:
        loaded = ctypes.CDLL(str(openblas))
        functions = [ctypes.cast(loaded[name], ctypes.c_void_p) for name in _SYMBOLS]
        forwarder = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, AttributeError) as error:
        return f"MLX's own (Netlib): {error}"
    forwarder.afm_blas_bind(*functions)
    return "NumPy's OpenBLAS"


def _built_library() -> Path | None:
    """Find the forwarding library in this folder, or, from a source checkout, in the installed package."""
    for package in (Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "afm_mlx"):
        if (library := package / "kernels" / "cpu" / "afm_blas.so").is_file():
            return library
    return None


def _numpy_openblas() -> Path | None:
    # Without importing NumPy, which takes longer than all the rest.
    from importlib.util import find_spec

    spec = find_spec("numpy")
    if spec is None or spec.origin is None:
        return None
    libraries = Path(spec.origin).parent.parent / "numpy.libs"
    return next(iter(sorted(libraries.glob("libscipy_openblas64_*.so*"))), None)
