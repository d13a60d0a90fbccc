"""Compiling for an NVIDIA GPU on a machine that has none: XLA's CUDA compiler against a description of the device.

Owns the descriptions, the compile call and the folder that the compiler dumps into; what the result is made of is read
in `pallas_kernels.program`. Nothing here runs on a GPU, so nothing is tuned on one: it shows structure, never speed.
"""

import functools
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax._src import config as jax_config  # the compilation cache has no public switch for a part of a process
from jax.experimental import topologies

from pallas_kernels.program import Program, read_program

PACKAGES = ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")
"""The extra `aot`."""


QUICK = {"xla_gpu_enable_analytical_sol_latency_estimator": False}
"""A scheduler's estimate of times, which parses its table anew for every matrix product of a sharded program: minutes,
where nothing depends on it but which copy between devices waits behind which product."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device as its data sheet has it.

    Attributes:
        memory_bytes: of one device; what a program may take.
        bandwidth: bytes per second of its memory.
        bfloat16_flops: of its tensor cores, without sparsity.
        target: what XLA's compiler wants to know, as text.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    bfloat16_flops: float
    target: str


H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80e9,
    bandwidth=3.35e12,
    bfloat16_flops=990e12,
    target="""
      gpu_device_info {
        cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
        core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84942979072
      }
      platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
      device_description_str: "NVIDIA H100 80GB HBM3"
    """,
)
GPUS = {"h100": H100}


def missing_packages() -> list[str]:
    """Those of the extra that are not installed."""
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    return [name for name in PACKAGES if name not in installed]


def described_devices(gpu: Gpu, hosts: int = 1, per_host: int = 1) -> Sequence[jax.Device]:
    """Devices to compile for; they hold no arrays and run nothing.

    Raises:
        NotImplementedError: the compiler is not installed, or JAX was started for a platform beside which it stays off.
    """
    if missing := missing_packages():
        raise NotImplementedError(
            f"Compiling for {gpu.name} without one needs {', '.join(missing)}; install it with pip install -e '.[aot]'."
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu.target, topology=f"1x{hosts}x{per_host}"
        )
    except NotImplementedError as error:
        raise NotImplementedError(
            f"JAX offers no CUDA compiler here ({error}); start with JAX_PLATFORMS=cpu in the environment."
        ) from error
    return topology.devices


def compile_for_gpu(lowered: jax.stages.Lowered) -> Program:
    """Machine code for the devices that the arguments of a lowered function are placed on, and what it is made of.

    The arguments are `ShapeDtypeStruct`s with a sharding over `described_devices`.
    """
    kernels = Path(_kernel_folder().name)
    with tempfile.TemporaryDirectory() as folder, jax_config.enable_compilation_cache(False), _dump_kernels(kernels):
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **QUICK}
        compiled = lowered.compile(compiler_options=options)
        return read_program(compiled, Path(folder), kernels)


@functools.cache
def _kernel_folder() -> tempfile.TemporaryDirectory:
    """One for the life of the process: a Mosaic kernel that it has compiled before is not dumped again."""
    return tempfile.TemporaryDirectory()


@contextmanager
def _dump_kernels(folder: Path) -> Iterator[None]:
    """Has the compiler of Mosaic kernels write what each of them takes into `folder`."""
    settings = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
