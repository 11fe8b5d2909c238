"""The HTTP server: OpenAI's protocol in front of the engine. Importing this loads nothing of it."""
