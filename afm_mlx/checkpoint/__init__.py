"""Model folders and training checkpoints: what is stored, checked before it is read, and written.

| file | what it holds |
| --- | --- |
| `safetensors_file.py` | one file: its header checked, its data read lazily or written as a stream |
| `weights.py` | the weight files of a model folder |
| `stored_layers.py` | layers that a folder stores packed, held against `config.json` |
| `finite.py` | whether numbers are finite |
| `fingerprint.py` | the name of "this very model" |
| `folder_texts.py` | `config.json`, the model card, tokenizer files |
| `toolkit_checkpoint.py` | checkpoints of Apple's toolkit |
"""
