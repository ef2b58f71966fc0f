"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs, and a chat page."""
