"""PyTorch's own operator database as a conformance suite for the bridge.

`python -m tests.torch_bridge.opinfo --ops all --out FILE` runs every operator, each in a process of its
own, and takes up where FILE ends. `test_opinfo.py` runs a fast fixed subset.
"""
