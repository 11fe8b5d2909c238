"""The window: a desktop face of the engine, in Qt."""
