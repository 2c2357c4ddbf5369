"""Full or delta, as the link and the codec were measured."""

import numpy as np
import pytest

from hpcrl.weights.couriers import delta_codec as module
from hpcrl.weights.couriers.codec_choice import NUM_MEASURED_VERSIONS, VERSIONS_PER_SAMPLE, CodecChooser, CodecSetting
from hpcrl.weights.layout import TensorLayout

LAYOUT = TensorLayout.pack([("w", "bfloat16", (1 << 20, 2))])
OLD = np.zeros(LAYOUT.nbytes, np.uint8)
SLOW, FAST = 1e-3, 1e15
"""Bytes a second that no coding fails to beat, and that none beats."""


def changed(share: float) -> np.ndarray:
    new = OLD.copy()
    values = new.view(np.uint16)
    values[: int(share * len(values))] = 7
    return new


def measured(link_nbytes_per_s: float, *, wants: CodecSetting = "auto") -> CodecChooser:
    pace = CodecChooser(setting=wants)
    for _ in range(NUM_MEASURED_VERSIONS):
        pace.record_full(LAYOUT.nbytes, LAYOUT.nbytes / link_nbytes_per_s)
    return pace


def choice(pace: CodecChooser, new: np.ndarray) -> tuple[str, str]:
    return pace.choose(LAYOUT, OLD.data, new.data)


@pytest.mark.parametrize("wants", ["full", "delta"])
def test_what_the_site_wants_is_done(wants: CodecSetting) -> None:
    assert choice(CodecChooser(setting=wants), changed(0.01)) == (wants, f'site.mpi.codec = "{wants}"')


def test_the_first_versions_go_in_full_to_measure_the_link() -> None:
    pace = CodecChooser(setting="auto")
    pace.record_full(LAYOUT.nbytes, 1e6)
    assert choice(pace, changed(0.01)) == ("full", "the link has not been measured yet")


def test_a_slow_link_gets_deltas_and_says_why() -> None:
    codec, reason = choice(measured(SLOW), changed(0.01))
    assert codec == "delta"
    assert "4.0 MiB in full" in reason


def test_a_link_that_is_quicker_than_coding_gets_whole_versions() -> None:
    assert choice(measured(FAST), changed(0.01))[0] == "full"


def test_versions_that_change_everywhere_go_in_full() -> None:
    assert choice(measured(SLOW), changed(1.0)) == ("full", "a delta would not be smaller")


def test_what_a_delta_took_counts_for_the_next_one() -> None:
    pace = measured(LAYOUT.nbytes)
    choice(pace, changed(0.01))
    pace.record_delta(1000, 50.0)
    assert choice(pace, changed(0.01))[0] == "full"


def test_after_some_whole_versions_it_is_looked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = measured(SLOW)
    assert choice(pace, changed(1.0))[0] == "full"
    looks = 0

    def count(*_: object) -> tuple[float, int]:
        nonlocal looks
        looks += 1
        return 0.01, LAYOUT.nbytes

    monkeypatch.setattr(module, "sample_delta_share", count)
    for _ in range(VERSIONS_PER_SAMPLE):
        assert choice(pace, changed(1.0))[0] == "full"
        pace.record_full(LAYOUT.nbytes, LAYOUT.nbytes / SLOW)
    assert choice(pace, changed(0.01))[0] == "delta"
    assert looks == 1
