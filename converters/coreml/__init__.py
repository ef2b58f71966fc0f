"""AFM model folders as Core ML packages: ML Programs of iOS 18 and macOS 15.

    folder -> Source (where each matrix lies) -> Program (constants without data) -> weight.bin, model.mlmodel

| | file |
| --- | --- |
| matrices and adapters of a folder, and refusals that need no coremltools | `source.py` |
| matrices as constants of a program | `compression.py` |
| functions and blocks in two arrangements of operators | `layouts.py` |
| a program into a package | `package_writer.py` |

Notable choices:

- The program is built by coremltools' MIL builder, and no pass of coremltools runs over it: what is written is
  what stands here. Its large constants are arrays of one number that is repeated without memory; the data is
  read, written to `weight.bin` and forgotten, one constant after the other.
- A constant is written once, however many functions and operations name it.
- Packed matrices stay packed: codes of 2, 4 and 8 bits with look-up tables. Products are multiplied by the
  scales of rows.
- Keys and values of all writing blocks are two states of float16, because coremltools 9 refuses a state of any
  other type for iOS 18. Where the model rounds keys and values to int8, the states hold the codes, which
  float16 holds exactly, and the scales are multiplied elsewhere.
- Rows of the query and key projections are reordered, so that RoPE turns the first half of a head against the
  second instead of neighbours: Core ML has no operation for neighbours. Scores don't change.
- An adapter is a pair of functions, which share all other weights. As inputs, a rank-32 adapter of the 3B would
  be 700 arrays, 133 MB that each prediction hands over, and products with matrices that are no constants,
  which convolutions can't do.
"""
