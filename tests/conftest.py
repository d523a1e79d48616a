"""How tests are divided among processes (scripts/test): whole files, and the tests of CUDA kernels together."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of every test; test_launched.py looks at what its process has launched."""
    for item in items:
        name = item.path.name
        kernels = name.startswith("test_kernels_") or name == "test_launched.py"
        group = "kernels" if kernels else f"{item.path.parent.name}/{name}"
        item.add_marker(pytest.mark.xdist_group(group))
