"""Networks of every kind, tiny and with random weights: torch eager against their conversion.

`python -m tests.torch_bridge.zoo --out FILE` runs all of them, each in a process of its own, and takes
up where FILE ends. `test_zoo.py` runs a few in CI and all of them as slow tests.
"""
