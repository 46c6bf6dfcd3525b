"""Make the build context of the images: the Dockerfile, every wheel that it installs, and the stand-in for an engine.

    python docker/context.py [--out build/image] [--python 3.11]

Afterwards `docker build build/image` needs no network. Wheels of other projects are downloaded with the pins of
constraints.txt, and again only when the pins or the list below change. The wheel of rdma-kv is built anew when a
source has changed, from a copy: setuptools would leave a `build/lib` in the tree, and take files from it that are gone from
the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

REQUIREMENTS = ("numpy", "msgspec", "tomli_w", "typer", "rich", "cffi")
"""What the sidecar imports; with what these ask for."""

ALONE = ("nixl-cu12",)
"""Without what it asks for, which is torch."""

SOURCES = ("rdma_kv", "pyproject.toml", "README.md", "LICENSE")
ENGINE = ("engine.py", "demo_engine.py", "demo_line.py")


def main() -> int:
    parser = argparse.ArgumentParser(description="make the build context of the images")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "image", help="folder of the context")
    parser.add_argument("--python", default="3.11", help="version of Python in the base image")
    options = parser.parse_args()
    make_context(options.out, options.python)
    print(options.out)
    return 0


def make_context(out: Path, python: str = "3.11") -> None:
    """Fill `out`. `python`: version in the base image, as `3.11`.

    Raises:
        subprocess.CalledProcessError: pip could not get or build a wheel; its own words are on standard error.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("Dockerfile", "healthcheck"):
        shutil.copy2(ROOT / "docker" / name, out / name)
    engine = _emptied(out / "engine")
    for name in ENGINE:
        shutil.copy2(ROOT / "tests" / "multinode" / name, engine / name)
    _dependencies(out / "dependencies", python)
    _own(out / "own")


def _dependencies(folder: Path, python: str) -> None:
    pins = (ROOT / "constraints.txt").read_bytes()
    key = hashlib.sha256(pins + repr((REQUIREMENTS, ALONE, python)).encode()).hexdigest()
    stamp = folder / ".key"
    if stamp.exists() and stamp.read_text() == key:
        return
    _emptied(folder)
    download = ["download", "--quiet", "--dest", str(folder), "--constraint", str(ROOT / "constraints.txt")]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    _pip(*download, *target, *REQUIREMENTS)
    _pip(*download, *target, "--no-deps", *ALONE)
    stamp.write_text(key)


def _own(folder: Path) -> None:
    key = _key_of_sources()
    stamp = folder / ".key"
    if stamp.exists() and stamp.read_text() == key:
        return
    _emptied(folder)
    with tempfile.TemporaryDirectory(prefix="rdma-kv-wheel-") as temporary:
        copy = Path(temporary)
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(copy))
    stamp.write_text(key)


def _key_of_sources() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        top = ROOT / name
        # os.walk rather than rglob: kernels and integration are links to folders
        files = [Path(folder) / file for folder, _, files in os.walk(top, followlinks=True) for file in files] or [top]
        for path in sorted(path for path in files if "__pycache__" not in path.parts):
            digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mode & 0o777}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _pip(*arguments: str) -> None:
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env=environment)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
