"""Lets vLLM 0.32.0 use an NCCL older than 2.29.7, the one it is built for. Test help, and no part of what ships.

vLLM asks the library for ncclCommSuspend and ncclCommResume, which put an idle engine to sleep and which nothing here
calls. Where they are missing it goes on without NCCL's communicators and says nothing; then the ranks of DCP never get
each other's results, and a pipeline stage reads tokens before they have come: the text is wrong.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

WRAPPER = "vllm.distributed.device_communicators.pynccl_wrapper"
MISSING = {"ncclCommSuspend", "ncclCommResume"}


class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, *_):
        if fullname != WRAPPER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            library = module.NCCLLibrary
            library.exported_functions = [f for f in library.exported_functions if f.name not in MISSING]

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
