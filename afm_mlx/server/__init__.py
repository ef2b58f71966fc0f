"""The HTTP server: OpenAI's and Anthropic's APIs, and a chat page."""
