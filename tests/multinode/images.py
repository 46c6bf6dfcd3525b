"""The images of the lab: a base (pulled, or made by debootstrap), then those of docker/Dockerfile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from commands import ROOT, LabError, run, say, works
from docker_engine import Docker

PUBLIC_BASE = "python:3.11-slim-bookworm"
OWN_BASE = "rdma-kv-base:bookworm"
RUNTIME, ENGINE = "rdma-kv:lab", "rdma-kv-engine:lab"
SUITE = "bookworm"
_INCLUDE = "python3-minimal,python3-venv,ca-certificates"
_NOT_NEEDED = (
    "var/cache/apt/*",
    "var/lib/apt/lists/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "dev/*",
)
_PULL_S = 60.0


def build(docker: Docker) -> dict[str, float]:
    """Make both images; seconds of each step. What has not changed is not made again.

    Raises:
        LabError: a step failed.
    """
    seconds: dict[str, float] = {}

    def step(name: str, begin: float) -> None:
        seconds[name] = round(time.monotonic() - begin, 1)
        say(f"{name}: {seconds[name]} s")

    begin = time.monotonic()
    base = _base(docker)
    step("base image", begin)
    begin = time.monotonic()
    version = docker.docker("run", "--rm", "--network", "none", "--entrypoint", "python3", base, "-c", _VERSION).strip()
    context = ROOT / "build" / "image"
    run([sys.executable, str(ROOT / "docker" / "context.py"), "--out", str(context), "--python", version])
    step("wheels", begin)
    begin = time.monotonic()
    for target, tag in (("runtime", RUNTIME), ("engine", ENGINE)):
        _build(docker, context, base, target, tag)
    step("images", begin)
    return seconds


_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def size_mb(docker: Docker, tag: str) -> float:
    return round(int(docker.docker("image", "inspect", "--format", "{{.Size}}", tag)) / 1e6, 1)


def _build(docker: Docker, context: Path, base: str, target: str, tag: str) -> None:
    command = [docker.client, "build", "--quiet", "--network", "none", "--build-arg", f"BASE={base}"]
    command += ["--target", target, "--tag", tag, str(context)]
    if works([docker.client, "buildx", "version"], env=docker.env):
        run(command, env=docker.env)
    else:  # the classic builder is in every client and daemon
        run(command, env={**docker.env, "DOCKER_BUILDKIT": "0"})


def _base(docker: Docker) -> str:
    """The tag of a base image that is here now."""
    if not docker.private:  # a private daemon has no network
        if works([docker.client, "image", "inspect", PUBLIC_BASE], env=docker.env):
            return PUBLIC_BASE
        say(f"pulling {PUBLIC_BASE}")
        if works([docker.client, "pull", "--quiet", PUBLIC_BASE], env=docker.env, limit_s=_PULL_S):
            return PUBLIC_BASE
    if works([docker.client, "image", "inspect", OWN_BASE], env=docker.env):
        return OWN_BASE
    if os.geteuid() != 0 or shutil.which("debootstrap", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
        raise LabError(f"{PUBLIC_BASE} cannot be pulled, and a base can be made only as root with debootstrap")
    say("making a base image by debootstrap (about two minutes, once)")
    with tempfile.TemporaryDirectory(prefix="rdma-kv-base-") as folder:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", f"--include={_INCLUDE}", SUITE, str(root), _mirror()])
        excluded = [f"--exclude=./{pattern}" for pattern in _NOT_NEEDED]
        tar = subprocess.Popen(["tar", "-C", str(root), *excluded, "-c", "."], stdout=subprocess.PIPE)
        load = [docker.client, "import", "-", OWN_BASE]
        done = subprocess.run(
            load, stdin=tar.stdout, env={**os.environ, **docker.env}, capture_output=True, text=True, check=False
        )
        if tar.wait() or done.returncode:
            raise LabError(f"the base could not be imported: {done.stderr}")
    return OWN_BASE


def _mirror() -> str:
    """The mirror of packages that this machine uses, so that no host is named here."""
    lines = run(["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)"]).splitlines()
    for line in lines:
        codename, _, site = line.partition(" ")
        if codename == SUITE:
            return site
    raise LabError(f"apt knows no mirror of {SUITE}; run `apt-get update`, or pull {PUBLIC_BASE} yourself")
