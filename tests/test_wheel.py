# SPDX-License-Identifier: Apache-2.0
"""What is built: the same bytes wherever and whenever it is, with a list of what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from environments import ROOT, run
from packaging.metadata import Metadata
from packaging.requirements import Requirement

BUILD = "import sys; import hatchling.build as b; getattr(b, 'build_' + sys.argv[1])(sys.argv[2])"


def build(what: str, tree: Path, out: Path, **environment: str) -> Path:
    """Build the "wheel" or "sdist" of ``tree`` as pip has it built, but with the backend of this environment."""
    out.mkdir(parents=True)
    done = run([sys.executable, "-c", BUILD, what, str(out)], cwd=tree, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.iterdir())


def digest(file: Path) -> tuple[str, str]:
    return file.name, hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist") / "dist")


def unpack(sdist: Path, folder: Path, time: int, mask: int) -> Path:
    """The tree in ``sdist``, as somebody else may have it: other folder, other times, other permissions."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    for path in tree.rglob("*"):
        os.utime(path, (time, time))
        path.chmod(path.stat().st_mode & ~mask)
    return tree


def test_the_same_tree_gives_the_same_bytes(sdist: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    one = unpack(sdist, tmp_path / "a", 1_000_000_000, 0o077)
    other = unpack(sdist, tmp_path / "elsewhere" / "and" / "deeper", 1_700_000_000, 0o000)
    surroundings: dict[str, str] = {"TMPDIR": str(tmp_path / "scratch"), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    for what, flags in (("wheel", ""), ("wheel", "-g"), ("sdist", "")):
        dist = tmp_path / "dist" / f"{what}{flags}"
        first = build(what, one, dist / "1", CFLAGS=flags)
        second = build(what, other, dist / "2", CFLAGS=flags, **surroundings)
        assert digest(first) == digest(second)
    assert digest(second) == digest(sdist), "an sdist made from an sdist is that sdist"
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left behind"


def test_a_build_that_must_have_its_extension_fails_and_leaves_nothing(tmp_path: Path) -> None:
    strict = {"BUILD_CTXFIX_NATIVE": "require", "CC": "/bin/false", "TMPDIR": str(tmp_path)}
    done = run([sys.executable, "-c", BUILD, "wheel", str(tmp_path / "dist")], cwd=ROOT, **strict)
    assert done.returncode == 1 and "the C extension was not built: /bin/false" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] in ([], ["dist"])


def test_the_wheel_of_the_tree_is_the_wheel_of_the_sdist(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    built = build("wheel", unpack(sdist, tmp_path / "tree", 1_500_000_000, 0), tmp_path / "dist")
    assert digest(built) == digest(wheel)


def test_nobody_else_may_write_to_what_the_wheel_brings(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {entry.external_attr >> 16 & 0o7777 for entry in archive.infolist()} <= {0o644, 0o755}


def test_sdist_holds_what_it_takes_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "SECURITY.md", "ctxfix-init.pth", "ctxfix/native/fabric.c",
            "tests/test_wheel.py", "docs/security.md"} <= names  # fmt: skip
    assert not [name for name in names if name.endswith((".so", ".pyc", ".jsonl"))]


# ---- the list of contents (SBOM, PEP 770) ----------------------------------------------------------------------------


def read(wheel: Path, suffix: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(suffix))
        return archive.read(name)


def test_sbom_is_valid_cyclonedx_where_tools_look_for_it(wheel: Path) -> None:
    pytest.importorskip("jsonschema", reason="cyclonedx-python-lib[json-validation] does not install here: no wheels")
    text = read(wheel, ".dist-info/sboms/ctxfix.cdx.json").decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_sbom_says_what_the_metadata_says(wheel: Path) -> None:
    sbom = json.loads(read(wheel, ".cdx.json"))
    metadata = Metadata.from_email(read(wheel, ".dist-info/METADATA"))
    about = sbom["metadata"]["component"]
    assert (about["name"], about["version"]) == (metadata.name, str(metadata.version))
    assert about["licenses"] == [{"expression": str(metadata.license_expression)}]
    wanted: dict[str, set[str]] = {"required": set(), "optional": set()}
    for requirement in metadata.requires_dist or []:
        if requirement.marker is None:
            wanted["required"].add(requirement.name)
        elif not any(requirement.marker.evaluate({"extra": extra}) for extra in ("dev", "docs")):
            wanted["optional"].add(requirement.name)
    for scope, names in wanted.items():
        assert {c["name"] for c in sbom["components"] if c["scope"] == scope} == names
    (tree,) = sbom["dependencies"]
    assert tree["dependsOn"] == sorted(f"pkg:pypi/{name}" for name in wanted["required"])
    for component in sbom["components"]:
        assert Requirement(component["properties"][0]["value"]).name == component["name"]


def test_sbom_names_the_sources_of_the_extension(wheel: Path, tmp_path: Path) -> None:
    def sources(wheel: Path) -> dict[str, str]:
        files = json.loads(read(wheel, ".cdx.json"))["metadata"]["component"]["components"]
        return {file["name"]: file["hashes"][0]["content"] for file in files}

    pure = build("wheel", ROOT, tmp_path / "dist", BUILD_CTXFIX_NATIVE="off")
    assert sources(pure) == {}
    if wheel.name.endswith("-none-any.whl"):
        pytest.skip("no C compiler: the wheel has no extension")
    expected = {
        f"ctxfix/native/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (ROOT / "ctxfix" / "native").glob("*.[ch]")
    }
    assert sources(wheel) == expected


@pytest.mark.parametrize(("configured", "stable"), [("", True), ("#define Py_GIL_DISABLED 1\n", False)])
def test_a_free_threaded_python_gets_an_extension_of_its_own_abi(tmp_path: Path, configured: str, stable: bool) -> None:
    """Until 3.15 it has no stable ABI. pyconfig.h tells, and the source has to ask it before it includes Python.h."""
    (tmp_path / "pyconfig.h").write_text(configured)
    (tmp_path / "Python.h").write_text("#ifdef Py_LIMITED_API\nstable\n#else\nown\n#endif\n")
    source = ROOT / "ctxfix" / "native" / "_native.c"
    done = run(["cc", "-E", "-P", f"-I{tmp_path}", str(source)])
    assert done.returncode == 0, done.stderr
    assert ("stable" in done.stdout.split(), "own" in done.stdout.split()) == (stable, not stable)
    assert ("PyUnstable_Module_SetGIL" in done.stdout) is not stable, "it needs no GIL, and has to say so"
