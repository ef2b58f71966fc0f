"""Reads Core ML packages and runs their functions in NumPy, to show on any platform what a package computes.

Of coremltools only the classes of the protobuf messages are used, none of its operations, so that a mistake
in what writes a package isn't made here, too. What the operations do is written from Apple's descriptions of
the opsets iOS 17 and iOS 18, and tested against coremltools' constant folding and PyTorch. There are those that
language models need; another one is refused by its name.

| file | what |
| --- | --- |
| `package.py` | the folder: manifest, model, weights; functions by name |
| `function.py` | a function: inputs of any allowed shape, state, operations in order |
| `features.py` | what an input, output or state may be |
| `values.py` | constants of the program, as arrays |
| `blobs.py` | the file of weights |
| `data_types.py` | the types of numbers, and how they are stored |
| `ops/` | pure functions by family, and the table of them |
"""

from tests.tools.mil.errors import MILError
from tests.tools.mil.package import Package

__all__ = ["MILError", "Package"]
