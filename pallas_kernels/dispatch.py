"""Which implementation of a kernel runs, and in words why another one does not."""

import functools
import logging
from typing import Literal, NamedTuple

import jax

Implementation = Literal["auto", "mosaic_gpu", "reference"]

UNPROVED = (
    "the Mosaic GPU kernels are interpreted and compiled for Hopper, but have not run on a GPU yet "
    "(docs/measurements.md); ask for mosaic_gpu to use them"
)


class Choice(NamedTuple):
    """What runs, and why it is not the kernel; the reason is empty where it is."""

    implementation: Literal["mosaic_gpu", "reference"]
    reason: str


def choose(op: str, implementation: Implementation, problem: str | None = None) -> Choice:
    """Resolves "auto"; a named implementation is taken at its word.

    Args:
        op: the operation's name.
        problem: what the kernel can't do in this call, if anything.

    Raises:
        NotImplementedError: the kernel is named, but can't do this call.
        ValueError: the name is none of ours.
    """
    if implementation not in ("auto", "mosaic_gpu", "reference"):
        raise ValueError(
            f"Unknown implementation {implementation!r} of {op}; choose 'auto', 'mosaic_gpu' or 'reference'."
        )
    if implementation == "reference":
        return Choice("reference", "the reference was asked for")
    if implementation == "mosaic_gpu":
        if problem:
            raise NotImplementedError(f"The Mosaic GPU kernel of {op} can't run this: {problem}.")
        return Choice("mosaic_gpu", "")
    reason = problem or _platform_problem() or UNPROVED
    _say(op, reason)
    return Choice("reference", reason)


def _platform_problem() -> str | None:
    """Why this process's default device can't run a Hopper kernel."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"the default device is a {device.platform.upper()}"
    capability = getattr(device, "compute_capability", "?")
    return None if capability == "9.0" else f"the GPU has compute capability {capability}, the kernels need 9.0"


@functools.cache
def _say(op: str, reason: str) -> None:
    """Once per reason."""
    logging.getLogger("pallas_kernels").info("%s runs its reference: %s", op, reason)
