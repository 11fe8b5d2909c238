"""The models page: the library and the way of a folder into it."""
