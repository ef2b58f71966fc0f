"""Reads Core ML packages and runs their functions in NumPy, to show on any platform what a package computes.

Of coremltools only the classes of the protobuf messages are used, none of its operations, so that a mistake
in the converter isn't repeated here. Operations are written from Apple's descriptions of the opsets iOS 17
and iOS 18, and tested against coremltools' constant folding and PyTorch. Only the operations of our packages
are known; another one is an error with its name.

| file | content |
| --- | --- |
| `package.py` | a package, its functions and constants |
| `ops.py` | the operations, as pure functions |
| `blobs.py` | the file of weights, and types of numbers |
"""

from tests.tools.mil.blobs import MILError
from tests.tools.mil.package import Package

__all__ = ["MILError", "Package"]
