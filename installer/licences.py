"""Whose works are in the packaged program: their licences as files, and a bill of materials in CycloneDX's form."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).resolve().parent / "texts"
OURS = TEXTS.parent.parent / "LICENSE"
_TEXT_ENDINGS = (".txt", ".md", ".rst", ".json")
_LEGAL = re.compile(r"(?i)(licen[cs]e|copying|notice|copyright|authors)")


@dataclass(frozen=True)
class Work:
    """Something of others that the program contains. texts: files with its licence; purl: its package URL."""

    name: str
    version: str
    licence: str
    purl: str
    texts: list[Path] = field(default_factory=list)
    home: str = ""


def works(files: Iterable[str]) -> list[Work]:
    """The works that collected files belong to, by name.

    Raises:
        SystemExit: a file belongs to nothing that is known, so its licence is not known either
    """
    owners = {
        os.path.normpath(str(distribution.locate_file(file))): distribution
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
    }
    found: dict[str, Work] = {}
    strangers: list[Path] = []
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    ours = TEXTS.parent.parent
    for file in map(Path, files):
        path = file.resolve()
        if not file.is_absolute() or not file.exists() or path.is_relative_to(ours):
            continue
        distribution = owners.get(os.path.normpath(file))
        if distribution is not None:
            found.setdefault(distribution.name, _of_distribution(distribution))
        elif path.is_relative_to(standard) or re.match(r"(?i)lib?python3|vcruntime|python3", path.name):
            found.setdefault("Python", _python(standard))
        elif sys.platform == "win32" and re.match(r"(?i)(api-ms-|ucrtbase|msvcp)", path.name):
            continue  # parts of Windows
        else:
            strangers.append(file)
    for work in _of_debian(strangers) if strangers else ():
        found.setdefault(work.name, work)
    return sorted(found.values(), key=lambda work: work.name.casefold())


def _of_distribution(distribution: importlib.metadata.Distribution) -> Work:
    about: Any = distribution.metadata  # a message of `email`, which the type does not say
    classifiers = [
        line.rsplit(" :: ", 1)[1] for line in about.get_all("Classifier", []) if line.startswith("License ::")
    ]
    licence = about.get("License-Expression") or (about.get("License") or "").split("\n")[0] or " or ".join(classifiers)
    brought = [
        Path(str(distribution.locate_file(file))) for file in distribution.files or () if ".dist-info/" in str(file)
    ]
    texts = [path for path in brought if _LEGAL.search(path.name) or "/licenses/" in path.as_posix()]
    if not texts and "LGPL" in licence:
        texts = [TEXTS / "qt.txt", TEXTS / "LGPL-3.0.txt", TEXTS / "GPL-3.0.txt"]
    elif not texts and "apache" in licence.lower():
        texts = [OURS]
    elif not texts:
        sys.exit(f"{distribution.name} comes without the text of its licence ({licence}); put it into {TEXTS}")
    texts += [path for path in brought if "/sboms/" in path.as_posix()]  # what is compiled into it
    home = about.get("Home-page") or (about.get_all("Project-URL", []) or [""])[0].rpartition(", ")[2]
    purl = f"pkg:pypi/{distribution.name.lower().replace('_', '-')}@{distribution.version}"
    return Work(
        distribution.name, distribution.version, licence, purl, [text for text in texts if text.is_file()], home
    )


def _python(standard: Path) -> Work:
    version = platform.python_version()
    debian = Path("/usr/share/doc", f"python{version.rpartition('.')[0]}", "copyright")
    texts = [
        path for path in (standard / "LICENSE.txt", Path(sys.base_prefix, "LICENSE.txt"), debian) if path.is_file()
    ]
    if not texts:
        sys.exit(f"Python's licence is not in {standard}; install its documentation")
    return Work("Python", version, "PSF-2.0", f"pkg:generic/python@{version}", texts[:1], "https://www.python.org")


def _of_debian(files: list[Path]) -> list[Work]:
    """The packages of Debian or Ubuntu that system libraries come from."""
    # `/lib` is a link to `/usr/lib`; packages name the one or the other.
    spellings = {
        str(name): file for file in files for name in (file, file.resolve(), str(file.resolve()).removeprefix("/usr"))
    }
    owned = _asked(["dpkg-query", "--search", *spellings])
    owners = {spellings[path]: line.split(":")[0] for line in owned if (path := line.rpartition(": ")[2]) in spellings}
    strangers = sorted(set(files) - set(owners))
    if strangers:
        sys.exit(f"{strangers[0]} belongs to no package that is known here, so its licence is not known")
    system = platform.freedesktop_os_release()["ID"]
    shown = "${Package}\t${Version}\t${Homepage}\n"
    made = []
    for line in _asked(["dpkg-query", "--show", "--showformat", shown, *sorted(set(owners.values()))]):
        package, version, home = line.split("\t")
        text = Path("/usr/share/doc", package, "copyright")
        named = re.findall(r"^License: *(\S.*)$", text.read_text("utf-8", "replace"), re.MULTILINE)
        licence = ", ".join(dict.fromkeys(named)) or "see its text"
        made.append(Work(package, version, licence, f"pkg:deb/{system}/{package}@{version}", [text], home))
    return made


def _asked(command: list[str]) -> list[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()


def write_licences(folder: Path, used: list[Work]) -> None:
    """A folder with the licence of every work and `index.txt`, which lists them."""
    lines = [
        "Inglenook is under Apache-2.0 (Apache-2.0.txt). It contains works of others, each under its own licence:",
        "",
    ]
    for work in used:
        target = folder / work.name
        target.mkdir(parents=True)
        for text in work.texts:
            name = re.sub(r".*\.dist-info/(licenses/)?", "", text.as_posix()) if "dist-info" in str(text) else text.name
            name = name.replace("/", "-") if text.suffix in _TEXT_ENDINGS else f"{name.replace('/', '-')}.txt"
            shutil.copyfile(text, target / name)
        lines.append(f"{work.name} {work.version}: {work.licence}{f' ({work.home})' if work.home else ''}")
    shutil.copyfile(OURS, folder / "Apache-2.0.txt")
    (folder / "index.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def bill_of_materials(name: str, version: str, used: list[Work]) -> dict[str, Any]:
    """What the program contains, as CycloneDX 1.5 has it."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": name, "version": version}},
        "components": [
            {
                "type": "library",
                "name": work.name,
                "version": work.version,
                "purl": work.purl,
                "bom-ref": work.purl,
                "licenses": [{"license": {"name": work.licence}}],
            }
            for work in used
        ],
    }


def write_bill(path: Path, name: str, version: str, used: list[Work]) -> None:
    """`bill_of_materials` as a file."""
    path.write_text(json.dumps(bill_of_materials(name, version, used), indent=1, ensure_ascii=False), encoding="utf-8")
