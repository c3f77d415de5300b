"""What is said to vLLM's own GPU transfers, held against the installed vLLM's definitions; the transfers themselves need GPUs."""

from __future__ import annotations

import json
import subprocess

from mappa_graph.gateway.vllm.environment import find
from mappa_graph.gateway.vllm.transfer import SyncClient, init_arguments

ASK = """
import json, sys
from vllm.distributed.weight_transfer import base, factory, ipc_engine, nccl_common, nccl_engine
given = json.loads(sys.argv[1])
nccl, ipc = nccl_engine.NCCLTrainerInitInfo(**given["nccl"]), ipc_engine.IPCTrainerInitInfo(**given["ipc"])
worker = nccl_common.NCCLWeightTransferInitInfo(
    master_address=nccl.master_address, master_port=nccl.master_port, rank_offset=1, world_size=nccl.world_size, packed=nccl.packed
)
update = nccl_engine.NCCLWeightTransferUpdateInfo(names=["w"], dtype_names=["float32"], shapes=[[2, 2]])
print(json.dumps({
    "sends": [nccl.is_sender, ipc.is_sender],
    "backends": [nccl.backend, ipc.backend],
    "trainers": sorted(factory.WeightTransferTrainerFactory._registry),
    "methods": sorted(name for name in vars(base.VLLMWeightSyncClient) if not name.startswith("_")),
    "source": hasattr(base, "ModuleSource"),
    "worker": nccl_common.worker_init_payload(worker),
}))
"""


def test_what_is_sent_is_what_the_installed_vllm_takes() -> None:
    given = {kind: init_arguments(kind, 2, host="10.0.0.1", port=29500) for kind in ("nccl", "ipc")}  # type: ignore[arg-type]
    asked = subprocess.run([str(find().python), "-c", ASK, json.dumps(given)], capture_output=True, text=True, check=False, timeout=280)
    assert asked.returncode == 0, asked.stderr[-2000:]
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found["sends"] == [True, True] and found["backends"] == ["nccl", "ipc"] and found["source"]
    assert {"nccl", "ipc"} <= set(found["trainers"])
    assert all(callable(getattr(SyncClient, name)) for name in found["methods"]) and len(found["methods"]) == 4
    assert found["worker"]["world_size"] == 3 and found["worker"]["master_address"] == "10.0.0.1"
