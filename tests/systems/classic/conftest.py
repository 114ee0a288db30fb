import pytest

from tests.systems.classic.small import make


class Forms(dict):
    """By form, each made when it is first asked for."""

    def __missing__(self, form):
        self[form] = make(form)
        return self[form]


@pytest.fixture(scope="session")
def made():
    return Forms()
