"""Several processes, on one machine or on many hosts, as one run: how they find each other, and what they agree on.

Every process runs the same program on its own share of the mesh. The first one alone writes what is not an array:
lines, records, flags. Nothing else in training knows how many processes there are.
"""

import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lilicorr_jax.sharding import MESH_AXES, replicated
from train.config import ClusterConfig


def join(config: ClusterConfig) -> None:
    """Connects this process to the others, before anything is computed; returns when all are there."""
    if config.coordinator is not None:  # JAX's own handler would swallow a SIGTERM until `stop_on_signal` has another
        jax.config.update("jax_enable_preemption_service", False)
    if config.coordinator == "slurm":
        jax.distributed.initialize(cluster_detection_method="slurm")
    elif config.coordinator is not None:
        jax.distributed.initialize(
            config.coordinator, config.processes, config.process, cluster_detection_method="deactivate"
        )


def is_first() -> bool:
    """Whether this process writes what must be written once."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come here; `what` names the place in errors."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def whole(tree):
    """A tree of arrays that lie on several hosts, as NumPy arrays on each of them; others are left alone."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda leaf: multihost_utils.process_allgather(leaf, tiled=True), tree)


def check_mesh(mesh: Mesh) -> None:
    """Raises ValueError unless every process owns a part of the mesh."""
    owners = {device.process_index for device in mesh.devices.flat}
    if len(owners) < jax.process_count():
        raise ValueError(
            f"{jax.process_count()} processes share {jax.device_count()} devices, but the mesh takes {mesh.size} "
            f"devices of {len(owners)}: make --mesh.data x --mesh.fsdp x --mesh.tensor {jax.device_count()}."
        )


class Stop:
    """Whether the run is to end before its last step: a signal to any process ends all, behind the same step."""

    def __init__(self, mesh: Mesh):
        self.received: list[int] = []
        self._shared = NamedSharding(mesh, PartitionSpec(MESH_AXES))
        self._size = mesh.size
        self._any = jax.jit(lambda wishes: wishes.any(), out_shardings=replicated(mesh))
        self._asked: deque[jax.Array] = deque()

    def is_agreed(self) -> bool:
        """To be called by all processes after each step. Among several, the answer is that of the call before, so that
        no device waits for it."""
        if jax.process_count() == 1:
            return bool(self.received)
        wish = bool(self.received)

        def on_own_devices(index: tuple[slice, ...]) -> np.ndarray:
            return np.full(len(range(*index[0].indices(self._size))), wish)

        shared = jax.make_array_from_callback((self._size,), self._shared, on_own_devices)
        self._asked.append(self._any(shared))
        return len(self._asked) > 1 and bool(self._asked.popleft())

    @property
    def exit_code(self) -> int:
        """As a shell counts signals; SIGTERM's where another process got the signal."""
        return 128 + (self.received[0] if self.received else signal.SIGTERM)


@contextmanager
def stop_on_signal(mesh: Mesh) -> Iterator[Stop]:
    """While it lasts, SIGTERM and SIGINT are noted instead of ending the process."""
    stop = Stop(mesh)
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: stop.received.append(number)) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
