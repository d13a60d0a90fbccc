"""The lines of a report: every number that was found stands in them."""

from pallas_kernels import report
from pallas_kernels.aot import H100

FOUND = {
    "memory_bytes": {"arguments": 19_546_000_000, "temporary": 69_000_000, "outputs": 0, "total": 81e9, "device": 80e9},
    "fits": False,
    "largest_arguments": {"params['embed']": 1_245_000_000},
    "largest_results": {"draft/add f32[2, 3]": 24},
    "collectives": {"all-gather": 12, "all-reduce": 3},
    "moved_bytes": {"all-gather": 5_000_000_000, "all-reduce": 1_000_000},
    "flops": 346.4e9,
    "bytes_accessed": 26.47e9,
    "floor_seconds": 5.83e-3,
    "kernels": [
        {"name": name, "registers": 149, "spill_bytes": 0, "shared_bytes": 14_344} for name in ("called", "elsewhere")
    ],
    "kernel_calls": {"called": 1},
}


def test_memory_is_given_in_gigabytes_and_held_against_the_device():
    lines = "\n".join(report.memory_lines(FOUND))
    assert "19.546 GB" in lines and "DOES NOT FIT 80.000 GB" in lines and "1.245 GB  params['embed']" in lines


def test_work_names_the_data_sheet():
    lines = "\n".join(report.work_lines(FOUND, H100))
    assert "346.4 GFLOP" in lines and "5.83 ms" in lines and "3.35 TB/s and 990 TFLOP/s" in lines


def test_collectives_are_counted_and_weighed():
    lines = report.collective_lines(FOUND)
    assert lines[1].split() == ["12", "all-gather", "5.000", "GB"] and lines[2].split()[:2] == ["3", "all-reduce"]
    assert report.collective_lines(FOUND | {"collectives": {}})[0].endswith("none")


def test_only_kernels_of_the_program_are_listed():
    lines = "\n".join(report.kernel_lines(FOUND))
    assert "called" in lines and "149 registers, 0 bytes spilled, 14344 bytes" in lines and "elsewhere" not in lines
