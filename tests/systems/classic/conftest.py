import pytest

from tests.systems.classic.small import FORMS, make


@pytest.fixture(scope="session")
def made():
    """By form, each made once."""
    return {form: make(form) for form in FORMS}
