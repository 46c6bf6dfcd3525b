"""Asks a sidecar how it is, over its socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from rdma_kv.errors import RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import error_of
from rdma_kv.sidecar.wire import Bye, Status, StatusIs, decode_of_sidecar, encode


async def ask_status(path: str | Path, timeout_s: float = 5.0) -> dict[str, Any]:
    """What `Sidecar.status` says there.

    Raises:
        SidecarLostError: nobody serves that socket, or there is no answer in time.
        ConfigError: field `allowed_uids`: we may not ask.
    """
    who = f"sidecar {path}"
    answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def fail(error: RdmaKvError) -> None:
        if not answer.done():
            answer.set_exception(error)

    def on_frame(body: bytes) -> None:
        message = decode_of_sidecar(who, body)
        if isinstance(message, StatusIs) and not answer.done():
            answer.set_result(message.status)
        elif isinstance(message, Bye):
            fail(error_of(message.fault))
        else:
            fail(RemoteProtocolError(who, f"{type(message).__name__} in answer to STATUS"))

    channel = Channel(await connect(path), name=who, on_frame=on_frame, on_lost=fail)
    channel.send(encode(Status()))
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError as exc:
        raise SidecarLostError(who, f"does not answer within {timeout_s} s") from exc
    finally:
        await channel.close()


async def connect(path: str | Path) -> socket.socket:
    """A connection to a sidecar's socket.

    Raises:
        SidecarLostError: nobody serves it, or the system refuses.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except OSError as exc:
        sock.close()
        raise SidecarLostError(f"sidecar {path}", f"cannot be reached: {exc.strerror or exc}") from exc
    return sock
