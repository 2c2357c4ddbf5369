"""Which packages have a module is answered as importlib.metadata answers it, and with less work."""

import importlib.metadata

from hpcrl.system.package_names import answer_quickly, map_packages

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 1\n\nName: not this one\n"


def install(folder, name, **files):
    directory = folder / f"{name}-1.dist-info"
    directory.mkdir()
    for file, text in {"METADATA": METADATA.format(name), **files}.items():
        (directory / file.replace("top_level", "top_level.txt")).write_text(text)


def test_every_module_here_has_the_distributions_that_importlib_finds():
    found = map_packages()
    for module, names in importlib.metadata.packages_distributions().items():
        assert sorted(found[module]) == sorted(names), module


def test_modules_are_those_that_a_distribution_declares_or_has_files_of(tmp_path, monkeypatch):
    install(tmp_path, "declared", top_level="one\ntwo\n", RECORD="other/__init__.py,,\n")
    files = ["three/__init__.py", "four.py", '"fi,ve/__init__.py"', "inferred-1.dist-info/RECORD", "../bin/tool"]
    install(tmp_path, "inferred", RECORD="".join(f"{file},sha256=x,1\n" for file in files))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert map_packages() == {
        "one": ["declared"], "two": ["declared"], "three": ["inferred"], "four": ["inferred"], "fi,ve": ["inferred"],
    }  # fmt: skip


def test_importlib_answers_slowly_again_after_the_block():
    slow = importlib.metadata.packages_distributions
    with answer_quickly():
        assert importlib.metadata.packages_distributions is map_packages
    assert importlib.metadata.packages_distributions is slow
