"""Images: from a picture's bytes to vectors that a language model takes for tokens.

| file | holds |
| --- | --- |
| `prompt_image.py` | pictures to tiles of pixels: `read_image`, `PromptImage` |
| `message_images.py` | images in the messages of data files: `with_images` |
| `encoder.py` | tiles to a vector for each patch: `VisionEncoder` |
| `adaptor.py` | patches to tokens: `VisionAdaptor` |
| `vision.py` | all of it: `Vision` |
"""
