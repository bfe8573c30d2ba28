"""Proves on a GPU that `aerie rehearse` passes there, with the real Kimi-K2.5's widths, and finds what is wrong.

    python tests/gpu/rehearsal.py --out results          # where vLLM 0.32.0's CUDA wheel is installed, patched or not

As `one_gpu.py`, whose docstring says the rest. The real pair, shrunken, takes 17 GB of disk below TMPDIR, and of the
GPU's memory what `config/kimi-k2.5.yaml` takes. The series must be recorded, as `write_record` of patches/apply.py does
it in the image.
"""

from __future__ import annotations

import sys

from items import Item, run

REHEARSED = "tests/gpu/rehearsed.py"
RANK = "tests/gpu/rank_of_eight.py"

AS_ON_SM_120 = "rehearses-as-on-sm-120"

ITEMS = [
    Item("real_pair", REHEARSED, ("real-pair-rehearses",), alone=True, seconds=540),
    Item("aux_layer", REHEARSED, ("aux-layer-beyond-the-model",), seconds=120),
    Item(
        "as_on_sm_120_unpatched",
        REHEARSED,
        seconds=120,
        unpatched={AS_ON_SM_120: "102,400 bytes of shared memory, and a block"},
    ),
    Item("tiny_pair", REHEARSED, ("tiny-pair-rehearses",), alone=True, seconds=400),
    Item("as_on_sm_120", REHEARSED, (AS_ON_SM_120,), alone=True, seconds=400),
    Item("rank_of_7_layers", RANK, ("{result}", "7"), alone=True),
    Item("rank_of_21_layers", RANK, ("{result}", "21"), alone=True),
    Item("backend", REHEARSED, ("backend-of-another-chip",), alone=True, seconds=240),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, ITEMS))
