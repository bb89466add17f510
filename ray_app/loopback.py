"""Keeps Serve's replicas off the network on an installation that serves this machine only."""

from typing import Any

import ray
import ray.serve._private.replica as replica

LOOPBACK = "127.0.0.1"


def keep_replica_on_loopback() -> None:
    """Call it in a replica's constructor. Does nothing where Ray's node has an address that others reach.

    Ray 2.60 opens a gRPC port in every replica on all interfaces (`[::]:0`), which unpickles what it is sent. It takes
    calls from other replicas only, so that on a loopback node nobody else has business there. The port is opened after
    the constructor has run.
    """
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    open_port = replica.add_port_to_grpc_server

    def on_loopback(server: Any, address: str) -> int:
        port: int = open_port(server, address.replace("[::]", LOOPBACK))
        return port

    replica.add_port_to_grpc_server = on_loopback
