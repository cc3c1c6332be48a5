"""Marks of this folder."""


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes, not seconds")
