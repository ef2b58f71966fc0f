"""Model folders, of AFM and of mlx-lm's Llama and Qwen3, as Core AI bundles for macOS 27 and iOS 27.

    folder -> Source (`../graph_source.py`) -> Module (functions, constants) -> NAME.aimodel in a bundle

| file | content |
| --- | --- |
| `plan.py` | what a bundle holds, and refusals that need no coreai-core |
| `constants.py` | matrices as constants of a module; packed matrices stay packed |
| `functions.py` | the functions of an asset, operation by operation |
| `vision_functions.py` | the functions that encode images |
| `zoo_source.py`, `zoo_functions.py` | the same for mlx-lm's Llama and Qwen3 |
| `bundle_writer.py` | a module into an asset, with tokenizer and metadata |
| `adapter_file.py` | an adapter as arrays that the asset's functions take |

Notable choices:

- Functions are built from the operations of `coreai._compiler.dialects`, as Apple's `coreai-torch` builds
  them: the public `coreai.authoring` has no states. PyTorch is not needed.
- Codes of 2 and 4 bits are passed to the module as packed bytes, the first code in the lowest bits, which is
  the folder's own packing, and as Apple's converter does. `coreai.constant` of coreai-core 1.0.0b3 would
  store a byte for each code, under a type of 2 or 4 bits, and such an asset ends the process that runs it.
- A constant is stored once, however many functions use it.
- Keys and values are two states: int8 codes if the model rounds them, else floats.
- An adapter is an input of functions that are made for it, an A and a B for each matrix: another adapter is
  other arrays. Or it is constants of functions that only it has.
"""
