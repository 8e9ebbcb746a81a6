"""What of a product a run asks for: fixtures that are dear make no more than that."""

import pytest


def asked_values(request: pytest.FixtureRequest, name: str) -> set[str]:
    """The values of a parameter among those tests of a fixture's file that will run."""
    items = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {each[name] for each in params if name in each}
