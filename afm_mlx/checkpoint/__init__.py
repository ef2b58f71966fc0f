"""Model folders and training checkpoints: what is stored, checked before it is read, and written.

| file | what it holds |
| --- | --- |
| `stored_tensor.py` | tensors in files: what they are, their bytes, bytes as numbers |
| `safetensors_file.py` | one file: its header checked, its data read lazily or written as a stream |
| `weights.py` | the weight files of a model folder |
| `stored_layers.py` | layers that a folder stores packed, held against `config.json` |
| `finite.py` | whether numbers are finite |
| `fingerprint.py` | the name of "this very model" |
| `folder_texts.py` | `config.json`, the model card, tokenizer files |
| `torch_file.py`, `toolkit_config.py`, `toolkit_keys.py` | checkpoints of Apple's toolkit |
"""
