"""Reading, checking and writing model folders and training checkpoints.

| file | content |
| --- | --- |
| `safetensors_file.py` | one file: its header is validated, its data read lazily or written as a stream |
| `weights.py` | the weight files of a model folder |
| `stored_layers.py` | layers that a folder stores packed, compared with `config.json` |
| `finite.py` | checks for NaN, infinity and numbers that overflow |
| `fingerprint.py` | a hash that identifies a model |
| `folder_texts.py` | `config.json`, the model card, tokenizer files |
| `toolkit_checkpoint.py` | checkpoints of Apple's toolkit |
"""
