"""The process of a sidecar: from its start to an exit status that is true.

SIGTERM and SIGINT drain: no call begins any more, those that run may end until `drain_s` is over, and then everything is
closed. A second signal ends the waiting at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from typing import Final, NoReturn

from rdma_kv.sidecar.health import Health
from rdma_kv.sidecar.interfaces import Watch
from rdma_kv.sidecar.logs import set_up
from rdma_kv.sidecar.server import Sidecar
from rdma_kv.sidecar.settings import SidecarConfig

logger = logging.getLogger("rdma_kv.sidecar")

CUT_OFF: Final = 3
"""Exit status where calls still ran when the time for draining was over, or a second signal came."""

NETWORK_CHANGED: Final = 4
"""Exit status where an address of this process went away (`interfaces`): it is to be started again."""

_LEAVE_S: Final = 2.0  # to tell engines and peers that the network has changed, over what is left of it


def run_sidecar(config: SidecarConfig) -> int:
    """Serve until a signal comes. Returns the exit status: 0, or `CUT_OFF`. `NETWORK_CHANGED` ends the process here.

    Raises:
        ConfigError: it cannot start; the field is named.
    """
    set_up(config.log_level, config.log_format)
    return asyncio.run(_serve(config))


async def _serve(config: SidecarConfig) -> int:
    began = time.monotonic()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    changed = asyncio.Event()

    def on_change() -> None:
        changed.set()
        stop.set()

    watch = Watch(on_change)
    try:
        watch.start()
    except OSError as exc:  # a sandbox without netlink
        logger.warning("the addresses of this host cannot be watched; restart the sidecar when they change: %s", exc)
    async with Sidecar(config) as sidecar:
        health = Health(lambda: sidecar.ready)
        try:
            if config.health:
                await health.start(config.health)
            facts = {"event": "ready", "socket": str(config.socket), "seconds": round(time.monotonic() - began, 3)}
            if config.health:
                facts["health"] = "{}:{}".format(*health.address)
            logger.info("ready", extra={"facts": facts})
            await stop.wait()
            if changed.is_set():
                await _leave(sidecar)
            left = await _drain(sidecar, config.drain_s, hurry)
            await sidecar.close()
        finally:
            watch.close()
            await health.close()
    logger.info("closed", extra={"facts": {"event": "closed", "cut_off": left}})
    return CUT_OFF if left else 0


async def _leave(sidecar: Sidecar) -> NoReturn:
    """End this process at once: a transport that has lost its interface may not live to see the next peer.

    Not by the usual way out: destructors of transports are not to be trusted either in this state.
    """
    facts = {"event": "network-changed", "exit_status": NETWORK_CHANGED}
    logger.error(
        "an address of this process has gone; it ends, to be started on the network that is there",
        extra={"facts": facts},
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            await sidecar.close()
    sys.stderr.flush()
    os._exit(NETWORK_CHANGED)


async def _drain(sidecar: Sidecar, drain_s: float, hurry: asyncio.Event) -> int:
    """How many calls are cut off."""
    draining = asyncio.ensure_future(sidecar.drain(drain_s, _progress))
    hurrying = asyncio.ensure_future(hurry.wait())
    await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not draining.done():
        draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
        left = sum(attachment.calls for attachment in sidecar.attachments)
        _progress(f"hurried: {left} calls are cut off")
        return left
    return draining.result()


def _progress(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, which is no reason to cut calls off
        print(text, file=sys.stderr, flush=True)
