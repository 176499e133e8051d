"""Which network interface an address of this host belongs to: collectives are told by name."""

from __future__ import annotations

import psutil


def interface_environment(address: str) -> dict[str, str]:
    """What binds gloo, NCCL and vLLM to the interface that has `address`; nothing where no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name, "VLLM_HOST_IP": address}
    return {}
