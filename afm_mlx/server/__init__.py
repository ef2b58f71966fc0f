"""The HTTP server: the routes that applications of OpenAI's and Anthropic's APIs speak to, and a chat page."""
