"""Proves on a GPU what no CPU can show, and measures: one call of under ten minutes.

    python tests/gpu/one_gpu.py --out results            # where vLLM 0.32.0's CUDA wheel is installed, patched or not
    docker run --rm --gpus all --shm-size 8g -v "$PWD:/aerie:ro" -v "$PWD/results:/results" --entrypoint python \\
        aerie:cuda /aerie/tests/gpu/one_gpu.py --out /results

Each item is a program that runs in a process of its own; with several GPUs, so many run at once. The engine with the
series and the one without are made of links to the installed package, which is left as it is. Results are written
after every item, as NAME.json and NAME.log; a table goes to stdout. Exit status 1 if a contract is broken, or holds
without the patch that it is there for.
"""

from __future__ import annotations

import sys

from items import CONTRACTS, Item, run

BF16 = {"AERIE_DTYPE": "bfloat16"}  # GPUs' MLA kernels take no other type
SPECULATION = f"{CONTRACTS}/speculation.py"

ITEMS = [
    Item("speculation", SPECULATION, ("speculation-equals-none", "sampled-speculation")),
    # Without verified-context: verified drafts are decodes to FLASH_ATTN_MLA.
    Item(
        "aux_values",
        f"{CONTRACTS}/aux_values.py",
        (
            "aux-values",
            "aux-values-first-and-last",
            "aux-values-chunked-prefill",
            "aux-values-prefix-cache",
            "drafter-inputs",
        ),
        environment=BF16,
    ),
    Item(
        "aux_values_triton",
        f"{CONTRACTS}/aux_values.py",
        ("aux-values", "aux-values-chunked-prefill", "aux-values-prefix-cache"),
        environment=BF16 | {"AERIE_ATTENTION_BACKEND": "TRITON_MLA"},
    ),
    Item("fp8_kv", "tests/gpu/serving.py", ("fp8-kv-serves",)),
    Item("decode_values", f"{CONTRACTS}/decode_kernel_values.py", seconds=200),
    Item(
        "decode_offsets_unpatched",
        f"{CONTRACTS}/decode_kernel_values.py",
        seconds=200,
        unpatched={"decode-offsets-64-bit": "its offset is beyond 32 bits"},
    ),
    Item("interfaces", f"{CONTRACTS}/interfaces.py", seconds=200),
    Item("aux_layer_ids", f"{CONTRACTS}/aux_layer_ids.py", seconds=200),
    Item(
        "aux_layer_ids_unpatched",
        f"{CONTRACTS}/aux_layer_ids.py",
        seconds=200,
        unpatched={"aux-layer-ids": "on V2, not", "aux-layer-ids-refused": "was accepted"},
    ),
    Item("llama_drafter", SPECULATION, ("llama-drafter",)),
    Item("fp8_kv_llama", "tests/gpu/serving.py", ("fp8-kv-serves-llama-drafter",)),
    Item("decode_times", "tests/gpu/decode_kernel.py", ("--json", "{result}"), alone=True, seconds=320),
]

if __name__ == "__main__":
    sys.exit(run(__doc__, ITEMS))
