"""Strangers' files with faults that chance thought of: each ends in one sentence, soon, without a trace.

    python -m tests.fuzz [--inputs 20000] [--only NAME] [--seed N]

`targets.py` says what is tried. A short run is part of the ordinary tests (`tests/test_fuzz.py`).
"""
