"""Which installed packages have a module: what transformers asks when it is imported.

map_packages      return the names of distributions by those of their modules
answer_quickly    let `importlib.metadata.packages_distributions` be `map_packages`

That of importlib.metadata parses all metadata, and makes an object of each file that was ever installed: a tenth of the
CPU time of `import transformers`.
"""

import contextlib
import importlib.metadata
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping


def map_packages() -> Mapping[str, list[str]]:
    """Return what `importlib.metadata.packages_distributions` returns, and maybe more names that no module has."""
    found: dict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
        names = [line[len("Name:") :].strip() for line in head.splitlines() if line.startswith("Name:")]
        for module in (distribution.read_text("top_level.txt") or "").split() or _list_modules(distribution):
            found[module] += names[:1]
    return dict(found)


def _list_modules(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the modules and packages among the files of a distribution."""
    modules = set()
    for line in (distribution.read_text("RECORD") or "").splitlines():
        first, is_inside, _ = line.strip('"').partition("/")
        name = first if is_inside else inspect.getmodulename(first.partition(",")[0])
        if name and "." not in name:
            modules.add(name)
    return modules


@contextlib.contextmanager
def answer_quickly() -> Iterator[None]:
    """Answer by `map_packages` in this block, which imports transformers."""
    slow = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = map_packages
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = slow
