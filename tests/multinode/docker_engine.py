"""A Docker engine for the lab: the one that runs, or a private one that leaves nothing behind.

The private daemon lives in namespaces of its own: its bridges, iptables rules, mounts and processes are not the host's, and
end with the first process of its PID namespace, whatever happens to it or to us. Data root, exec root, socket and PID file
are its own, and so are its cgroups. What stays is the cache: the data root with the images, in the folder that the caller
names.

Nothing of a Docker that runs already is touched but what the lab makes in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from commands import LabError, run, say, works

PACKAGES = ("docker.io", "docker-compose", "iptables", "iproute2", "debootstrap")
_START_S = 60.0
NAME = "rdma-kv-lab-"  # and our PID: folders and cgroups of a lab


@dataclass
class Docker:
    """A daemon that answers.

    Attributes:
        env: what clients need in their environment to find it.
        enter: prefix of a command that shall run where the daemon's processes and namespaces are.
        private: we have started it.
    """

    client: str
    compose: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    enter: tuple[str, ...] = ()
    private: bool = False

    def docker(self, *arguments: str, limit_s: float = 120.0, check: bool = True) -> str:
        """Raises LabError."""
        return run([self.client, *arguments], env=self.env, limit_s=limit_s, check=check)

    def inside(self, *arguments: str, check: bool = True) -> str:
        """Run a program beside the daemon, where the PIDs that it tells are right. Raises LabError."""
        return run([*self.enter, *arguments], limit_s=60.0, check=check)


def _client(env: dict[str, str]) -> str | None:
    """A client that this daemon answers. Debian's own goes first: another one on PATH may be too new to build with it."""
    for name in ("/usr/bin/docker", shutil.which("docker")):
        if name and works([name, "version"], env=env):
            return name
    return None


def _compose(client: str, env: dict[str, str]) -> tuple[str, ...]:
    if works([client, "compose", "version"], env=env):
        return client, "compose"
    if (old := shutil.which("docker-compose")) and works([old, "version"], env=env):
        return (old,)
    raise LabError("neither `docker compose` nor docker-compose is here; install one of them")


def running_docker() -> Docker | None:
    """The engine that runs on this machine for this user, if there is one."""
    if (client := _client({})) is None:
        return None
    return Docker(client, _compose(client, {}))


def cannot_start_private() -> str:
    """Why no private engine can be started here; empty where it can."""
    if os.geteuid() != 0:
        return "no Docker runs, and only root can start a private one"
    if not Path("/etc/debian_version").exists() and shutil.which("dockerd") is None:
        return "no Docker runs, there is no dockerd, and this is no Debian to install it on"
    return ""


def install_packages() -> None:
    """Debian's packages, where they are missing. Their service is not started. Raises LabError."""
    needed = {"dockerd": "docker.io", "docker-compose": "docker-compose", "iptables": "iptables"}
    needed |= {"tc": "iproute2", "debootstrap": "debootstrap"}
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if all(shutil.which(program, path=path) for program in needed):
        return
    say(f"installing {', '.join(PACKAGES)}")
    env = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # RUNLEVEL: maintainers' scripts start no service
    run(["apt-get", "update", "-qq"], env=env)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], env=env)


@contextlib.contextmanager
def private_docker(cache: Path) -> Iterator[Docker]:
    """Start a daemon of our own and end it.

    Args:
        cache: its data root lies there, and nothing else lasts. One lab at a time uses it.

    Raises:
        LabError: another lab uses the cache, or the daemon does not come up; the end of its log is in the text.
    """
    install_packages()
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(cache / "lock", "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise LabError(f"another run uses {cache}; wait for it") from exc
        state = Path("/run") / f"{NAME}{os.getpid()}"  # short: Unix sockets have 107 bytes for their path
        state.mkdir(mode=0o700)
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        stack.enter_context(hold(state))
        cgroup = state.name
        stack.callback(_remove_cgroups, cgroup)
        process = stack.enter_context(_daemon(state, cache / "docker", cgroup))
        first = _first_process(process)
        env = {"DOCKER_HOST": f"unix://{state}/docker.sock"}
        _wait_for(process, env, state)
        client = _client(env)
        if client is None:
            raise LabError(f"no docker client speaks to the private daemon\n{_tail(state)}")
        enter = ("nsenter", "--target", str(first), "--mount", "--net", "--pid", "--")
        yield Docker(client, _compose(client, env), env, enter, private=True)


@contextlib.contextmanager
def _daemon(state: Path, data: Path, cgroup: str) -> Iterator[subprocess.Popen[bytes]]:
    dockerd = ["dockerd", "--data-root", str(data), "--exec-root", str(state / "exec"), "--pidfile", str(state / "pid")]
    dockerd += ["--host", f"unix://{state}/docker.sock", "--bridge", "none", "--cgroup-parent", f"/{cgroup}"]
    dockerd += ["--storage-driver", "overlay2", "--userland-proxy=false"]
    # `setpriv`: it ends with us, even if we are killed. --kill-child: everything inside ends with it.
    spaces = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--ipc", "--fork"]
    spaces += ["--kill-child", "--mount-proc", "--propagation", "private"]
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    inner = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *dockerd]
    env = {**os.environ, "PATH": path, "CONTAINERD_NAMESPACE": "rdma-kv-lab"}
    with open(state / "log", "wb") as log:
        process = subprocess.Popen(
            [*spaces, *inner], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        for end in (process.terminate, process.kill):
            with contextlib.suppress(ProcessLookupError):
                first = _first_process(process, needed=False)
                if first and end == process.terminate:
                    os.kill(first, 15)  # dockerd itself: it ends its containers and unmounts
                else:
                    end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
                break
        process.wait()


def _first_process(process: subprocess.Popen[bytes], *, needed: bool = True) -> int:
    """The child of `unshare`: PID 1 of the daemon's namespace."""
    deadline = time.monotonic() + 10.0
    while True:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):
            if text := children.read_text().split():
                return int(text[0])
        if not needed:
            return 0
        if process.poll() is not None or time.monotonic() > deadline:
            raise LabError("the private daemon's namespaces could not be made")
        time.sleep(0.02)


def _wait_for(process: subprocess.Popen[bytes], env: dict[str, str], state: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not works(["/usr/bin/docker", "info"], env=env):
        if process.poll() is not None or time.monotonic() > deadline:
            raise LabError(f"the private daemon did not come up\n{_tail(state)}")
        time.sleep(0.2)


def _tail(state: Path) -> str:
    return (state / "log").read_text(errors="replace")[-2000:]


def hold(folder: Path) -> TextIO:
    """Mark a folder as used as long as the returned file is open; the kernel closes it for whoever is killed."""
    lock = open(folder / "lock", "w")  # noqa: SIM115 - open for as long as the caller lives
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def clear_stale() -> None:
    """Remove folders and cgroups of labs that were killed. Their processes have ended with them."""
    for state in (*Path("/run").glob(f"{NAME}*"), *Path("/tmp").glob(f"{NAME}*")):
        with contextlib.suppress(OSError):  # BlockingIOError: it is in use. No lock file: it begins just now
            with open(state / "lock", "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_cgroups(state.name)
            shutil.rmtree(state, ignore_errors=True)


def _remove_cgroups(name: str) -> None:
    """Folders of cgroups that containers left, the innermost first; one that is in use stays."""
    for root in (*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup") / name):
        for folder, _, _ in os.walk(root, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def enter_network(docker: Docker, pid: int, command: Sequence[str]) -> list[str]:
    """A command inside the network namespace of a container's process."""
    return [*docker.enter, "nsenter", "--target", str(pid), "--net", "--", *command]
