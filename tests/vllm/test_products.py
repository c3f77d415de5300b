"""The arithmetic of adapters on a CPU, inside the installed vLLM, against one row at a time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from mappa_graph.gateway.vllm import plugin
from mappa_graph.gateway.vllm.environment import find

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import mappa_vllm, torch
mappa_vllm._mend_adapters()
mappa_vllm._mend_adapters()
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

torch.manual_seed(0)
TABLE, RANK, IN, OUT = 3, 4, 8, (6, 2)
found = {}
for dtype in (torch.float32, torch.bfloat16):
    for name, rows in {"mixed": [7, 0, 9, 9, 0, 8, 7], "one": [9, 9, 9], "none": [0, 0]}.items():
        for prefill in (True, False):
            wrapper = PunicaWrapperCPU(64, 64, "cpu")
            mapping = LoRAMapping(index_mapping=tuple(rows), prompt_mapping=tuple(rows), is_prefill=prefill)
            wrapper.update_metadata(mapping, [7, 8, 9], TABLE, 100)
            a = [torch.randn(TABLE, 1, RANK, IN, dtype=dtype) for _ in OUT]
            b = [torch.randn(TABLE, 1, out, RANK, dtype=dtype) for out in OUT]
            x, y = torch.randn(len(rows), IN, dtype=dtype), torch.randn(len(rows), sum(OUT), dtype=dtype)
            head_a, head_b, logits = torch.randn(TABLE, 1, RANK, IN), torch.randn(TABLE, 1, 5, RANK), torch.randn(len(rows), 7)
            wanted, wanted_logits = y.double(), logits.double()
            for row, adapter in enumerate(rows):
                if adapter:
                    i, start = adapter - 7, 0
                    for one, other, out in zip(a, b, OUT):
                        wanted[row, start : start + out] += 0.5 * (x[row].double() @ one[i, 0].double().T) @ other[i, 0].double().T
                        start += out
                    wanted_logits[row, :5] += 0.5 * (x[row].double() @ head_a[i, 0].double().T) @ head_b[i, 0].double().T
            wrapper.add_lora_linear(y, x, a, b, 0.5, OUT)
            wrapper.add_lora_logits(logits, x.float(), head_a, head_b, 0.5)
            long = torch.zeros(len(rows) + 1, 7)
            wrapper.add_lora_logits(long, torch.randn(len(rows) + 1, IN), head_a, head_b, 0.5)
            key = f"{str(dtype)[6:]} {name} {'prefill' if prefill else 'decode'}"
            found[key] = [(y - wanted).abs().max().item(), (logits - wanted_logits).abs().max().item(), long.abs().max().item()]
print(json.dumps(found))
"""


def test_each_row_gets_its_own_adapter_and_rows_without_one_get_none_though_the_table_is_full() -> None:
    folder = Path(plugin.__file__).parent if getattr(plugin, "__file__", None) else Path(next(iter(plugin.__path__)))
    asked = subprocess.run([str(find().python), "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False, timeout=280)
    assert asked.returncode == 0, asked.stderr[-3000:]
    found = json.loads(asked.stdout.splitlines()[-1])
    assert len(found) == 12
    for key, (linear, head, prompt) in found.items():
        assert linear == pytest.approx(0, abs=1e-5 if "float32" in key else 0.2), key
        assert head == pytest.approx(0, abs=1e-5) and prompt == 0, key
