"""The chat page: conversations, the transcript, the composer, the controls."""
