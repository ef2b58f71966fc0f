"""Text and chats to token ids, and back.

| file | what it holds |
| --- | --- |
| `protocol.py` | the type `Tokenizer`, which `AFMTokenizer` and `ZooTokenizer` satisfy |
| `tokenizer.py`, `detokenizer.py` | `AFMTokenizer`; ids to text while they are generated |
| `vocabulary.py` | tokenizer files and the vocabularies in them: SentencePiece's, Hugging Face's |
| `chat_messages.py`, `chat_template.py`, `template_sandbox.py` | chats to text |
| `control_tokens.py` | messages can't write control tokens |
| `embedding_text.py` | the tokens of a text whose vector is wanted |
| `zoo_tokenizer.py` | tokenizers of mlx-lm's models |
| `tokenizer_export.py` | writing tokenizer files for a model folder |
"""
