"""What the tests of the sources agree on."""

from aerie.cache.manifest import SEGMENT

REVISION = "0123456789abcdef0123456789abcdef01234567"
SHARD = 2 * SEGMENT + 4711
"""Bytes: three segments."""
