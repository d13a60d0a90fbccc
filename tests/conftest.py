"""The strict JAX in which every test runs, the markers' skips, and the few fixtures that all tests share.

It owns no models and no data: those stand beside the tests that need them.
"""

import importlib.metadata
import os
from pathlib import Path

# Before JAX looks for devices. Tests marked `gpu` run with JAX_PLATFORMS=cuda,cpu, which is left as it is.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A test's program takes longer to compile than to run, so neither XLA's emitters nor LLVM's passes pay: without them a
# train step compiles in a fifth of the time. Processes that tests start inherit it; whoever sets XLA_FLAGS decides.
# Programs for a GPU are left as they are: `pytest_runtest_setup` sees to those that are compiled without one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    if os.environ["JAX_PLATFORMS"] == "cpu"
    else "",
)

import flax.struct
import jax
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NUM_CPU_DEVICES = 8
GOLDEN = Path(__file__).parent / "golden"

pytest.register_assert_rewrite("tests.tolerance")

jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytree_with_unchecked_fields(cls=None, _dataclass=flax.struct.dataclass, **options):
    """`flax.struct.dataclass` whose constructor takes anything: functions that use the record check its arrays.

    JAX rebuilds a pytree with shapes, shardings, stacked or mapped leaves in the place of arrays (`eval_shape`, `scan`,
    `vmap`), where a constructor that insisted on the annotated axes would refuse honest programs.
    """
    if cls is None:
        return lambda cls: pytree_with_unchecked_fields(cls, **options)
    record = _dataclass(cls, **options)
    record.__no_type_check__ = True  # read by jaxtyping, for the constructor alone
    return record


flax.struct.dataclass = pytree_with_unchecked_fields


def pytest_configure(config):
    """Keeps compiled programs in pytest's cache, for this process and those it starts; --cache-clear forgets them.

    A rerun that is mostly compilation takes a third of the time.
    """
    if cache := getattr(config, "cache", None):
        settings = {
            "jax_compilation_cache_dir": str(cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.1,
        }
        for name, value in settings.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    for item in items:
        for reason in filter(None, (skip_reason(marker.name, config) for marker in item.iter_markers())):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item):
    """What is compiled for an H100 is optimised as a user's is."""
    if item.get_closest_marker("aot"):
        from pallas_kernels import aot

        aot.QUICK.setdefault("xla_backend_optimization_level", 3)


def skip_reason(marker: str, config: pytest.Config) -> str | None:
    """Why a test with this marker can't run here, or None if it can."""
    if marker == "slow" and not config.getoption("--slow"):
        return "slow: run with --slow"
    if marker == "gpu" and not has_gpu():
        return "gpu: JAX sees no NVIDIA GPU; on a machine that has one, run with JAX_PLATFORMS=cuda,cpu"
    if marker == "aot" and (missing := missing_requirements("aot")):
        return f"aot: {', '.join(missing)} not installed; run pip install -e '.[aot]'"
    return None


def has_gpu() -> bool:
    return any(device.platform in ("gpu", "cuda") for device in jax.devices())


def missing_requirements(extra: str) -> list[str]:
    """The packages of one of this project's extras that are not installed."""
    installed = {canonicalize_name(distribution.name) for distribution in importlib.metadata.distributions()}
    requirements = map(Requirement, importlib.metadata.requires("lilicorr-jax") or ())
    wanted = [
        r.name for r in requirements if r.marker and "extra" in str(r.marker) and r.marker.evaluate({"extra": extra})
    ]
    return [name for name in wanted if canonicalize_name(name) not in installed]


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference numbers; each subfolder's README says where they come from."""
    return GOLDEN


@pytest.fixture
def rng() -> np.random.Generator:
    """A fresh NumPy generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def key() -> jax.Array:
    """A fixed JAX random key."""
    return jax.random.key(0)


@pytest.fixture
def strict_dtypes():
    """No implicit dtype promotion, for tests of our own models, losses, decoding and kernels (optax breaks under it).

    A whole file asks for it with `pytestmark = pytest.mark.usefixtures("strict_dtypes")`.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield
