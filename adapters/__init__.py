"""LoRA adapters: `files` reads and writes their folders, `lora` has layers to train, `attach` runs them."""
