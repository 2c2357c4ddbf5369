"""The choice of full or delta, by the measured link and codec."""

import numpy as np
import pytest

from hpcrl.config.site import CodecSetting
from hpcrl.weights.couriers import delta_codec as module
from hpcrl.weights.couriers.codec_choice import NUM_MEASURED_VERSIONS, VERSIONS_PER_SAMPLE, CodecChooser
from hpcrl.weights.layout import TensorLayout

LAYOUT = TensorLayout.pack([("w", "bfloat16", (1 << 20, 2))])
OLD = np.zeros(LAYOUT.nbytes, np.uint8)
SLOW, FAST = 1e-3, 1e15
"""Bytes per second of a link slower than any coding, and of one faster than any."""


def changed(share: float) -> np.ndarray:
    new = OLD.copy()
    values = new.view(np.uint16)
    values[: int(share * len(values))] = 7
    return new


def measured(link_nbytes_per_s: float, *, wants: CodecSetting = "auto") -> CodecChooser:
    chooser = CodecChooser(setting=wants)
    for _ in range(NUM_MEASURED_VERSIONS):
        chooser.record_full(LAYOUT.nbytes, LAYOUT.nbytes / link_nbytes_per_s)
    return chooser


def choice(chooser: CodecChooser, new: np.ndarray) -> tuple[str, str]:
    return chooser.choose(LAYOUT, OLD.data, new.data)


@pytest.mark.parametrize("wants", ["full", "delta"])
def test_the_setting_of_the_site_is_used(wants: CodecSetting) -> None:
    assert choice(CodecChooser(setting=wants), changed(0.01)) == (wants, f'site.mpi.codec = "{wants}"')


def test_the_first_versions_are_sent_in_full_to_measure_the_link() -> None:
    chooser = CodecChooser(setting="auto")
    chooser.record_full(LAYOUT.nbytes, 1e6)
    assert choice(chooser, changed(0.01)) == ("full", "the link has not been measured yet")


def test_a_slow_link_gets_deltas_with_a_reason() -> None:
    codec, reason = choice(measured(SLOW), changed(0.01))
    assert codec == "delta"
    assert "4.0 MiB in full" in reason


def test_a_link_that_is_faster_than_coding_gets_whole_versions() -> None:
    assert choice(measured(FAST), changed(0.01))[0] == "full"


def test_versions_that_change_everywhere_are_sent_in_full() -> None:
    assert choice(measured(SLOW), changed(1.0)) == ("full", "a delta would not be smaller")


def test_what_a_delta_took_counts_for_the_next_one() -> None:
    chooser = measured(LAYOUT.nbytes)
    choice(chooser, changed(0.01))
    chooser.record_delta(1000, 50.0)
    assert choice(chooser, changed(0.01))[0] == "full"


def test_after_some_whole_versions_a_new_sample_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = measured(SLOW)
    assert choice(chooser, changed(1.0))[0] == "full"
    looks = 0

    def count(*_: object) -> tuple[float, int]:
        nonlocal looks
        looks += 1
        return 0.01, LAYOUT.nbytes

    monkeypatch.setattr(module, "sample_delta_share", count)
    for _ in range(VERSIONS_PER_SAMPLE):
        assert choice(chooser, changed(1.0))[0] == "full"
        chooser.record_full(LAYOUT.nbytes, LAYOUT.nbytes / SLOW)
    assert choice(chooser, changed(0.01))[0] == "delta"
    assert looks == 1
