"""`python -m train.main`: flags, a record, one call."""

import sys

from lilicorr_jax.flags import run_main
from train.config import TrainConfig
from train.loop import train
from train.preflight import dry_run

EXAMPLES = """
python -m train.main --flagfile=train/flagfiles/demo.flags
python -m train.main --flagfile=train/flagfiles/demo.flags --method=domino --output=runs/demo-domino
python -m train.main --flagfile=train/flagfiles/qwen3_8b.flags --target=/models/Qwen3-8B --data=replies.npz
python -m train.main --flagfile=train/flagfiles/qwen3_8b.flags --dry_run=true --gpu=h100 --topology=1x8
"""


def main(arguments: list[str] | None = None) -> int:
    run = lambda config: dry_run(config) if config.dry_run else train(config)
    return run_main(TrainConfig, run, program="train.main", examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
