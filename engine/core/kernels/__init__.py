"""The kernels, in Python for numba; compiled ahead of time by `engine.core.build`, never while the engine runs."""
