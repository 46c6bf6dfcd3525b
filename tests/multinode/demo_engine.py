"""One process of `rdma-kv demo` beside a sidecar: the demo's own replica, its agent replaced by the client of the sidecar.

Its parent, on the other end of standard input and output, is the demo's own as well (`rdma_kv.demo.run`). Needs torch and
transformers, which the images do not have: the tests mount the site-packages of the environment they run in.
"""

from __future__ import annotations

import asyncio
import os
import sys

from demo_line import spec_of

from rdma_kv.client import Client
from rdma_kv.demo.model import warm
from rdma_kv.demo.replica import Replica, _answer, model_thread
from rdma_kv.demo.wire import Channel, Go, Started, Stop


async def _streams() -> Channel:
    """Frames over standard input and output; what the process prints goes to standard error."""
    loop = asyncio.get_running_loop()
    frames = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, frames)
    return Channel(reader, asyncio.StreamWriter(transport, protocol, None, loop))


async def run(socket: str, text: str) -> None:
    """Be one process of the demo until the parent says Stop or is gone."""
    channel = await _streams()
    shape, spec = spec_of(text)
    with model_thread() as executor:
        model = await asyncio.get_running_loop().run_in_executor(executor, warm, shape)
        async with Client(spec.config(model), socket) as client:
            replica = Replica(spec, model, client, executor)  # type: ignore[arg-type] - the same verbs as an Agent
            channel.send(Started("sidecar", 1))
            async with asyncio.TaskGroup() as group:
                while not isinstance(message := await channel.receive(), Stop | None):
                    if not isinstance(message, Go):
                        group.create_task(_answer(replica, message, channel))
    await channel.close()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
