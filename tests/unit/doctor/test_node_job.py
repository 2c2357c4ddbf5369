"""The jobs of a doctor, before Slurm gets them."""

from hpcrl.doctor.node_job import list_engine_partitions
from tests.support.plans import make_site


def test_one_partition_of_each_kind_of_gpu_and_python_starts_a_server() -> None:
    assert list_engine_partitions(make_site("lab")) == ["prefill", "decode"]
    assert list_engine_partitions(make_site("lab", "partitions.decode.gpu=h100")) == ["prefill"]
    other = make_site("lab", "partitions.train.python=/opt/python")
    assert list_engine_partitions(other) == ["prefill", "decode", "train"]
