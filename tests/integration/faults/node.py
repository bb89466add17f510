"""A second Ray node on loopback: `python node.py HOST:PORT SESSION_DIRECTORY`.

`ray start --address` does not join a head that keeps to loopback; what it calls does, as `ray.cluster_utils.Cluster` shows.
"""

import signal
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(address: str, directory: str) -> None:
    host, _, _ = address.rpartition(":")
    params = RayParams(
        gcs_address=address,
        node_ip_address=host,
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100 * 1024**2,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=None,
        include_log_monitor=False,
        temp_dir=directory,
    )
    node = Node(params, head=False, shutdown_at_exit=True, spawn_reaper=False)
    print(f"node {node.node_id} is up", flush=True)
    while not node.dead_processes() and not signal.sigtimedwait({signal.SIGTERM}, 1):
        pass  # as `ray start --block` does: a node that has lost its head ends


if __name__ == "__main__":
    main(*sys.argv[1:])
