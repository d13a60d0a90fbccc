"""Where parameters lie in a CPU's memory: on huge pages, where the system has them.

A decoding step reads every weight once. On pages of 4 KiB the processor looks up an address for each of them, in a
virtual machine twice over, and reads at half the rate that its memory has. Owns nothing but the memory it hands out.
"""

import mmap

import jax
import numpy as np

ALIGNMENT = 64
"""Bytes to which an array must be aligned for JAX to use it where it lies."""


def on_huge_pages[Tree](tree: Tree) -> Tree:
    """The same arrays in one piece of memory that the kernel is asked to back with huge pages.

    Arrays of NumPy's become JAX's. A tree of which anything lies on another device than the first CPU comes back as it
    is, and so does any where programs run elsewhere or the system takes no such advice (Linux does). The copy exists
    beside the original until its owner lets go of it.
    """
    leaves, structure = jax.tree.flatten(tree)
    device = jax.local_devices()[0]
    elsewhere = any(isinstance(leaf, jax.Array) and leaf.devices() != {device} for leaf in leaves)
    if device.platform != "cpu" or elsewhere or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tree
    starts = np.cumsum([0, *(-(-leaf.nbytes // ALIGNMENT) * ALIGNMENT for leaf in leaves)]).tolist()
    memory = mmap.mmap(-1, max(starts[-1], ALIGNMENT), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel that was built without huge pages
        return tree

    def copied(leaf: jax.Array | np.ndarray, start: int) -> jax.Array:
        view = np.frombuffer(memory, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        view[...] = np.asarray(leaf)
        return jax.device_put(view, may_alias=True)  # not committed to its device: a program would compile again

    return jax.tree.unflatten(structure, [copied(*each) for each in zip(leaves, starts, strict=False)])
