"""AFM model folders as Core ML packages: ML Programs of iOS 18 and macOS 15.

    folder -> Source (`../graph_source.py`) -> Program (constants without data) -> weight.bin, model.mlmodel

| file | content |
| --- | --- |
| `plan.py` | what a package can hold, and refusals |
| `compression.py` | matrices as constants of a program |
| `layouts.py` | functions and blocks in two arrangements of operators |
| `package_writer.py` | a program into a package |

Notable choices:

- The program is built by coremltools' MIL builder, and none of coremltools' passes changes it.
- A constant is written once, however many functions and operations use it. Memory holds one at a time.
- Packed matrices stay packed: codes of 2, 4 and 8 bits with look-up tables. Products are multiplied by the
  scales of rows.
- Keys and values of all writing blocks are two states of float16, because coremltools 9 refuses a state of any
  other type for iOS 18. If the model rounds keys and values to int8, the states hold the codes, which float16
  holds exactly, and the scales are multiplied elsewhere.
- An adapter is a pair of functions, which share all other weights. As inputs, a rank-32 adapter of the 3B would
  be 700 arrays, 133 MB for each prediction, and products with matrices that are no constants, which
  convolutions can't compute.
"""
