"""The labs that imitate sites."""

from pathlib import Path

import pytest

from hpcrl.config.site import load_site
from hpcrl.config.toml import find_toml, shipped_folder
from hpcrl.errors import LabError
from hpcrl.lab.conf import LabDir, check_path, write_conf
from hpcrl.lab.likeness import MAX_NODES, imitate_site, write_lab_site
from tests.support.described_sites import DESCRIBED, find_described
from tests.support.plans import make_site, plan_recipe

SITES = sorted(path.stem for path in shipped_folder("sites").glob("*.toml"))
WITH_SLURM = [name for name in SITES if load_site(name).scheduler == "slurm" and not name.startswith("lab")]


@pytest.mark.parametrize("name", WITH_SLURM)
def test_a_lab_has_the_partitions_nodes_and_names_that_jobs_of_the_site_ask_for(name: str) -> None:
    site, cluster = make_site(name), imitate_site(make_site(name))
    partitions = {partition.name for partition in cluster.wide}
    assert {part.slurm_partition or "all" for part in site.partitions.values()} == partitions
    assert {part.qos for part in site.partitions.values() if part.qos} == set(cluster.qos)
    assert all(1 <= group.num_nodes <= MAX_NODES for group in cluster.groups)
    for part in site.partitions.values():
        alike = [
            group for group in cluster.groups if (group.num_gpus, group.gpu) == (part.gpus_per_node, part.gpu or "")
        ]
        assert any(set((part.constraint or "").split("&")) - {""} <= set(group.features) for group in alike)


def test_nodes_have_the_cores_threads_and_memory_of_the_site() -> None:
    gpu = imitate_site(make_site("perlmutter")).groups[0]
    assert (gpu.num_cpus, gpu.threads_per_core, gpu.mem_mib, gpu.num_gpus) == (128, 2, 235 * 1024, 4)
    assert gpu.features == ("gpu",)


def test_the_configuration_of_such_a_lab_names_everything(tmp_path: Path) -> None:
    cluster = imitate_site(load_site(find_described("v100")))
    ports = list(range(30_000, 30_002 + len(cluster.node_names())))
    lab = LabDir(tmp_path)
    write_conf(lab, cluster=cluster, ports=ports, user="root")
    text = lab.conf.read_text()
    assert "Licenses=gpfs:100" in text
    assert "Feature=v100-32,v100,32g CPUs=40 CoresPerSocket=40 ThreadsPerCore=1 RealMemory=184320" in text
    assert "PartitionName=batch Nodes=v100-n1,v100-n2,v100-n3,v100-n4,cpu-n1,cpu-n2,cpu-n3,cpu-n4 Default=YES" in text


@pytest.mark.parametrize("name", [*WITH_SLURM, *map(find_described, DESCRIBED)])
def test_the_site_file_of_the_lab_is_the_site_with_what_the_lab_has(name: str, tmp_path: Path) -> None:
    site = load_site(name)
    path = write_lab_site(site, source=find_toml("sites", name), root=tmp_path)
    written = load_site(str(path))
    assert written.slurm_conf == f"{tmp_path}/slurm.conf"
    assert all(written.list_interfaces(label) == ["lo"] for label in written.partitions)
    assert all(part.max_nodes <= MAX_NODES for part in written.partitions.values())
    assert {label: part.gpu for label, part in written.partitions.items()} == {
        label: part.gpu for label, part in site.partitions.items()
    }
    check_path(Path("/tmp/hpcrl-lab-65534"), cluster=imitate_site(site))


def test_a_site_without_slurm_cannot_be_imitated() -> None:
    with pytest.raises(LabError, match="site 'workstation' has no Slurm"):
        imitate_site(load_site("workstation"))


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_few_lines_describe_a_cluster_that_is_planned(name: str) -> None:
    assert plan_recipe(site=find_described(name)).components
