"""The map of a campaign's directory has every path in it."""

import inspect
import re

import hpcrl.campaign_dir.paths as paths_module

JOINED = re.compile(r'self\.root / "([^"]+)"')


def test_the_map_names_every_file_and_directory():
    names = JOINED.findall(inspect.getsource(paths_module))
    assert len(names) > 30
    assert [name for name in names if name not in str(paths_module.__doc__)] == []
