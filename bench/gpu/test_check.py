"""The check of GPUs on CPUs: its sections, and what it makes of packages that are missing and of tests that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.__main__ import NAMES, read_report
from bench.gpu.sections import SECTIONS, CheckedDevice

REPORT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b"><skipped message="needs megatron-core"/></testcase>
<testcase name="test_c"><error message="at setup">ModuleNotFoundError: No module named 'peft.tuners'</error></testcase>
{more}</testsuite></testsuites>"""
FAILURE = '<testcase name="test_d"><failure message="assert 1 == 2&#10;more">...</failure></testcase>'
EQUALITIES = {
    "publish": {"share of equal versions": 1.0},
    "parity": {"fp32: difference of the loss": 0.0, "fp32: difference of the gradient": 0.0},
    "chunked": {"difference of the gradients": 0.0},
    "packed": {"largest difference of a log-prob": 0.0},
}
"""What a device must agree with, which on a CPU is itself or another order of the same sums."""


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_measures_on_a_cpu(name: str) -> None:
    found = SECTIONS[name](CheckedDevice("cpu"))
    values = {figure.name: figure.value for figure in found.figures}
    assert values
    assert all(figure.ok and figure.value >= 0 for figure in found.figures)
    for equal, expected in EQUALITIES.get(name, {}).items():
        assert values[equal] == pytest.approx(expected, abs=1e-4)


def test_a_missing_package_is_named_and_the_other_sections_run(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "xxhash.py").write_text("raise ModuleNotFoundError(\"No module named 'xxhash'\")\n")
    report = tmp_path / "report.json"
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--json", str(report), "publish", "parity"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    sections = json.loads(report.read_text())["sections"]
    assert [(each["status"], each["reason"]) for each in sections.values()] == [
        ("not run", "needs the package xxhash")
    ] * 2
    assert list(sections) == ["publish", "parity"] == [line.split()[0] for line in done.stdout.splitlines()[:2]]
    assert str(report) in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(("more", "status"), [("", "ok"), (FAILURE, "failed")])
def test_a_report_of_tests_lists_what_was_not_run_and_what_failed(tmp_path: Path, more: str, status: str) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(more=more))
    found = read_report(report)
    assert (found["status"], found["num_passed"]) == (status, 1)
    assert found["not_run"] == ["test_b: needs megatron-core", "test_c: needs the package peft"]
    assert found["failures"] == (["test_d: assert 1 == 2"] if more else [])
    assert set(SECTIONS) == set(NAMES) - {"tests"}
