"""What the doctor finds in the file system of campaigns."""

from pathlib import Path

import pytest

from hpcrl.doctor import file_checks as checks


def test_a_file_that_is_never_seen_is_on_no_shared_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LAG_TIMEOUT_S", 0.0)
    assert "that all nodes share" in checks.check_lag(tmp_path / "x.signal").change
    (tmp_path / "late.signal").write_text("0")
    assert checks.check_lag(tmp_path / "late.signal").state == "warning"


def test_a_second_node_makes_the_file_that_the_first_has_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SIGNAL_DELAY_S", 0.0)
    (tmp_path / "x.looked").touch()
    checks.make_signal(tmp_path / "x.signal")
    assert checks.check_lag(tmp_path / "x.signal").state == "ok"


def test_hdf5_is_tried_where_campaigns_are(tmp_path: Path) -> None:
    assert checks.check_hdf5(tmp_path).state == "ok"
    assert "HDF5_USE_FILE_LOCKING" in checks.check_hdf5(tmp_path / "absent").change
    assert list(tmp_path.iterdir()) == []


def test_a_slow_file_system_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [result.name for result in checks.check_rates(tmp_path)] == ["fsync-rate", "open-rate"]
    for name in ("MIN_FSYNCS_PER_S", "MIN_OPENS_PER_S"):
        monkeypatch.setattr(checks, name, 1e12)
    assert [result.state for result in checks.check_rates(tmp_path)] == ["warning", "warning"]
    assert list(tmp_path.iterdir()) == []
