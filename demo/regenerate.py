"""The target's own replies, for training drafters, and held-out prompts: `python -m demo.regenerate`.

Writes replies.npz, a token file as `train.tokens` reads it, and heldout.jsonl, prompts as `serve.workload` reads them.
Both follow from the seed and the target alone.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo import corpus
from demo.quality import measure
from demo.rows import turn
from lilicorr_jax.config import setting
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.flags import run_main
from lilicorr_jax.models.target import Target


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Regenerate the demo's replies and held-out prompts."""

    target: str = setting("demo/target", "Folder of the target and its tokenizer.")
    output: str = setting("demo", "Folder for replies.npz and heldout.jsonl.")
    seed: int = setting(0, "Seed of both sets of prompts.")
    replies: int = setting(5600, "Training prompts, shared out as in the corpus; a multiple of 20.")
    heldout: int = setting(40, "Held-out prompts of each category.")

    def __post_init__(self):
        if self.replies < 20 or self.replies % 20:
            raise ValueError(f"--replies must be a positive multiple of 20; got {self.replies}.")
        if self.heldout < 1:
            raise ValueError(f"--heldout must be at least 1; got {self.heldout}.")


def write_token_file(
    path: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]], categories: Sequence[str]
) -> None:
    """Prompts and replies as one compressed .npz: tokens, offsets, prompt_lengths, category (see `train.tokens`)."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = [token for pair in zip(prompts, answers, strict=True) for part in pair for token in part]
    np.savez_compressed(
        path,
        tokens=np.array(tokens, np.uint16),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        category=np.array(categories),
    )


def write_heldout(path: Path, records: Sequence[corpus.Record]) -> None:
    """Prompts as one JSON object a line: id, category, turns."""
    lines = [
        json.dumps({"id": f"{record.category}-{number:03}", "category": record.category, "turns": [record.prompt]})
        for number, record in enumerate(records)
    ]
    path.write_text("\n".join(lines) + "\n")


def run(settings: RegenerateConfig) -> None:
    """The whole command; a reply that does not end by itself is left out, and counted."""
    folder, output = Path(settings.target), Path(settings.output)
    config, params = load_target(folder)
    target, tokenizer = Target(config), Tokenizer.from_file(str(folder / "tokenizer.json"))
    each = dict.fromkeys(corpus.CATEGORIES, settings.heldout)
    heldout = corpus.distinct("heldout", seed=settings.seed, per_category=each)
    write_heldout(output / "heldout.jsonl", heldout)
    print("held-out prompts:", *measure(target, params, tokenizer, heldout)[0], sep="\n  ")

    shares = {category: settings.replies * corpus.SHARES.count(category) // 20 for category in corpus.CATEGORIES}
    records = corpus.distinct("replies", seed=settings.seed, per_category=shares)
    quality, answers = measure(target, params, tokenizer, records)
    print("training prompts:", *quality, sep="\n  ")
    ended = [(r, a) for r, a in zip(records, answers, strict=True) if a[-1] in config.eos_ids]
    print(f"{len(records) - len(ended)} replies left out, since they did not end; {len(ended)} written")
    write_token_file(
        output / "replies.npz",
        [turn(tokenizer, record.prompt, "")[0] for record, _ in ended],
        [answer for _, answer in ended],
        [record.category for record, _ in ended],
    )


if __name__ == "__main__":
    sys.exit(run_main(RegenerateConfig, run, program="demo.regenerate", examples="python -m demo.regenerate"))
