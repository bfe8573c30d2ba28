"""Triton's kernels on a CPU, by Triton's own interpreter. Test help: a GPU compiles them.

PyPI's Triton has no CPU backend, without which vLLM takes it for absent.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends

    class Driver:
        @classmethod
        def is_active(cls) -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=Driver)
