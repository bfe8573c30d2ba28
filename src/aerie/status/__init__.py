"""The status port: a page for people, `/status` and `/ready` for programs, `/metrics` for Prometheus."""

from aerie.status.server import serve_status

__all__ = ["serve_status"]
