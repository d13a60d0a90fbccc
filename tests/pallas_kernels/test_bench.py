"""The kernels' benchmark: it measures on a GPU, and where there is none says so."""

import json

import pytest

from pallas_kernels import bench
from pallas_kernels.cases import LATTICE_CASES, TOPK_CASES, WALK_CASES, tagged
from tests.conftest import has_gpu


@pytest.mark.skipif(has_gpu(), reason="a machine without a GPU is meant")
def test_without_a_gpu_there_is_nothing_to_measure(capsys):
    assert bench.main([]) == 0
    said, line = capsys.readouterr().out.splitlines()
    assert said == "No GPU here (JAX's default device is a CPU): nothing to measure."
    assert json.loads(line)["measured"] is False


@pytest.mark.gpu
def test_every_case_is_measured_and_slower_than_its_bytes(capsys):
    assert bench.main(["--repeats=3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["measured"] and len(found["rows"]) == len(tagged(TOPK_CASES + LATTICE_CASES + WALK_CASES, "gpu"))
    assert all(min(row["reference_us"], row["mosaic_gpu_us"]) > row["floor_us"] > 0 for row in found["rows"])
