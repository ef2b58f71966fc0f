"""Text and chats to token ids, and back.

| file | what it holds |
| --- | --- |
| `tokenizer.py`, `vocabulary.py`, `detokenizer.py` | text to ids and back, by both kinds of file |
| `chat_messages.py`, `chat.py`, `chat_template.py`, `template_sandbox.py` | chats to text |
| `caller_text.py`, `control_tokens.py` | messages can't write control tokens |
| `tokenizer_config.py` | `tokenizer_config.json` and the chat template of a model folder |
| `tokenizer_export.py` | tokenizer files for a model folder |
| `mlx_lm_protocol.py` | what mlx-lm asks of a tokenizer |
"""
