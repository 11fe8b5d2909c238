"""What the window keeps and reads: conversations, preferences, files; knows no widget."""
