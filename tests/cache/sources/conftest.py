"""See tests/sources_models.py."""

from sources_models import model, publish  # noqa: F401 - fixtures
