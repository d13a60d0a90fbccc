"""What the benchmark calls accepted, rejected and plain is so, and the work that it counts is that of the weights."""

import jax
import pytest
from flax.traverse_util import flatten_dict

from benchmarks.block import block_work
from benchmarks.contestant import answers, random_target
from benchmarks.random_drafter import drafter_for, random_checkpoint

SETTINGS = {
    "width": 16, "ffn_width": 24, "layers": 4, "drafter_layers": 2, "num_heads": 2, "num_kv_heads": 1,
    "head_width": 12, "vocab_size": 48, "num_slots": 3, "max_positions": 64, "mask_id": 47, "seed": 0,
    "prompt_ids": [5, 6, 7, 8, 9], "new_tokens": 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def answered() -> dict[str, dict]:
    tasks = ["rejected", "accepted", "plain"]
    _, *found = answers(SETTINGS, iter(tasks))
    return dict(zip(tasks, found, strict=True))


def test_accepted_drafts_fill_every_block(answered):
    assert answered["accepted"]["token_ids"] == [0] * 9
    assert (answered["accepted"]["blocks"], answered["accepted"]["tau"]) == (2, 4.0)  # and the prefill's token


def test_drafting_changes_no_token(answered):
    assert answered["rejected"]["token_ids"] == answered["plain"]["token_ids"]
    assert (answered["plain"]["blocks"], answered["plain"]["tau"]) == (8, 1.0)


def test_counted_work_is_that_of_the_weights():
    target, params = random_target(SETTINGS)
    drafter, reranker = drafter_for(target, layers=2, num_slots=3, mask_id=47, width=8)
    trees = {"target": params, "drafter": random_checkpoint(drafter, reranker, 0).params["drafter"]}
    kernels = {path: leaf.size for path, leaf in flatten_dict(trees).items() if path[-1] == "kernel"}
    once = sum(kernels.values())
    absorbed = sum(size for path, size in kernels.items() if path[0] == "drafter" and path[-2] in ("k_proj", "v_proj"))
    table = jax.tree.leaves(params["unembed"])[0].size
    operations, num_bytes = block_work(SETTINGS)
    assert operations == 2 * 4 * (once + absorbed + 2 * table)
    assert num_bytes == 4 * (once + absorbed + table)
