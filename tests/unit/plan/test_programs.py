"""Programs of agents at their limits against the nodes that the plan gives them."""

import pytest

from hpcrl.errors import PlanError
from tests.support.plans import plan_recipe

PLENTY = ("domains.sums.options.max_memory_mb=2048", "domains.sums.options.max_disk_mb=512")


def warnings(*settings: str, site: str = "lab") -> list[str]:
    return [line for line in plan_recipe(*settings, recipe="agent", site=site).warnings if "programs" in line]


def test_the_shipped_limits_are_what_is_reserved() -> None:
    assert warnings() == []


def test_programs_that_exceed_their_node_together_are_a_warning_with_what_would_hold_them() -> None:
    (line,) = warnings(*PLENTY)
    assert line == (
        "domains.sums.options: 8 programs may run at once on a node, and each may use 2.5 GiB (max_memory_mb = 2048, "
        "and max_disk_mb = 512 of files, which are in memory): 20 GiB, and the node has 4 GiB for them: lower these "
        "limits, set env_memory_gib = 2.5 and resources.env.mem_gib_per_worker = 21"
    )


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.max_running=4", "resources.env.mem_gib_per_worker=11"),
        ("domains.sums.env_memory_gib=2.5", "resources.env.mem_gib_per_worker=6"),
    ],
)
def test_fewer_programs_at_once_fit(settings: tuple[str, ...]) -> None:
    assert not [line for line in warnings(*PLENTY, *settings) if "on a node" in line]


def test_the_number_of_running_episodes_that_fits_is_named() -> None:
    (line,) = warnings(*PLENTY, "resources.env.mem_gib_per_worker=12")
    assert "set rollout.max_running = 4, or" in line


def test_a_machine_without_a_scheduler_has_all_its_memory() -> None:
    assert warnings(*PLENTY, site="local") == []
    (line,) = warnings(*PLENTY, "site.partitions.host.mem_gib_per_node=28", site="local")
    assert "20 GiB, and the node has" in line


def test_a_judge_has_a_disk_too() -> None:
    (line,) = warnings(*PLENTY, 'domains.sums.options.judge=["python", "j.py"]')
    assert "each may use 3 GiB" in line
    assert "for the program and its judge each" in line


def test_one_program_that_no_node_holds_is_refused() -> None:
    with pytest.raises(PlanError, match=r"one program may use 41 GiB .* has 12 GiB for programs: lower these limits"):
        warnings("domains.sums.options.max_memory_mb=40960", "domains.sums.options.max_disk_mb=1024")


def test_files_of_programs_in_images_are_compared_with_the_scratch_of_a_node() -> None:
    image = ('domains.sums.options.image="/a.sif"', "domains.sums.options.max_disk_mb=2048")
    assert warnings(*image) == []
    (line,) = warnings(*image, "site.partitions.env.scratch_gib_per_node=10")
    assert "each may write 2 GiB (max_disk_mb = 2048): 16 GiB, and the node has 10 GiB of scratch" in line


def test_places_for_fewer_programs_than_running_episodes_are_a_warning() -> None:
    (line,) = warnings("resources.env.mem_gib_per_worker=3")
    assert line.startswith("4 isolated environments or programs run at once, not rollout.max_running = 8")


def test_limits_of_a_wrong_type_are_left_to_the_environment() -> None:
    assert warnings('domains.sums.options.max_memory_mb="much"') == []


IMAGE = 'domains.sums.options.image="docker://acme/{repo}"'


def image_warnings(*settings: str, site: str = "lab") -> list[str]:
    return [line for line in plan_recipe(*settings, recipe="agent", site=site).warnings if "aarch64" in line]


def test_images_of_tasks_on_arm_nodes_are_a_warning() -> None:
    (line,) = image_warnings(IMAGE, "site.partitions.env.architecture=aarch64")
    assert line == (
        "domains.sums.options.image = 'docker://acme/{repo}' runs on nodes of partition env, which are aarch64: one "
        'that was made for x86-64 alone, as most are, fails there with "exec format error"; choose a site with x86-64 '
        "nodes for environments, or tasks whose images are for aarch64 too"
    )


def test_nodes_with_grace_hopper_are_arm_unless_the_site_names_others() -> None:
    (line,) = image_warnings(IMAGE, "model.path=acme/m", site="alps")
    assert "partition normal, which are aarch64" in line
    assert not image_warnings(IMAGE, "site.partitions.normal.architecture=x86_64", site="alps")
    assert not image_warnings(IMAGE)


def test_programs_without_an_image_of_a_registry_run_on_arm_nodes() -> None:
    arm = "site.partitions.env.architecture=aarch64"
    assert not image_warnings(arm)
    assert not image_warnings(arm, 'domains.sums.options.image="/images/own.sif"')


def test_an_image_that_only_evaluations_have_is_warned_of_too() -> None:
    (line,) = image_warnings(
        "site.partitions.env.architecture=aarch64", 'evaluation.options.sums.image="docker://acme/test"'
    )
    assert line.startswith("evaluation.options.sums.image = 'docker://acme/test'")
