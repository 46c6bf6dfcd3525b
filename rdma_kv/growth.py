"""More staging memory, where slots that are held without a proof, or retired, have left too little.

One addition at a time: the memory is made, registered with every data plane, told to every peer that may be granted a
slot of it, and only then do its slots go to the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rdma_kv.config import StagingConfig
from rdma_kv.datalinks import DataLinks
from rdma_kv.errors import RdmaKvError
from rdma_kv.messages import MAX_SLOTS
from rdma_kv.slots import SlotPool
from rdma_kv.staging import Staging
from rdma_kv.tasks import Tasks
from rdma_kv.transport.planes import Planes

logger = logging.getLogger(__name__)


class Growth:
    """Adds segments to the staging of one agent, up to `max_staging_bytes` of memory that is not retired.

    Args:
        grown: told when slots were added, or could not be.
    """

    def __init__(
        self,
        config: StagingConfig,
        pool: SlotPool,
        staging: Staging,
        planes: Planes,
        links: DataLinks,
        tasks: Tasks,
        *,
        grown: Callable[[], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._staging = staging
        self._planes = planes
        self._links = links
        self._tasks = tasks
        self._grown = grown
        self._growing = False
        self._exhausted = False  # the system or a data plane takes no more memory

    def request(self, peer_name: str) -> bool:
        """Have slots added, so that `peer_name` gets one and the usable slots are as many as configured.

        Returns:
            Whether slots are being added. False: as much as is allowed is there.
        """
        if self._growing:
            return True
        room = self._config.max_slots - self._pool.working
        room = min(room, MAX_SLOTS - self._pool.total)
        count = min(self._pool.missing(peer_name, self._config.slots), room)
        if count <= 0 or self._exhausted or self._staging.full:
            return False
        self._growing = True
        self._tasks.spawn(self._grow(count), "more staging memory")
        return True

    async def _grow(self, count: int) -> None:
        try:
            await self._add(count)
        except BaseException:  # a bug, or the end of the agent: nobody must wait for these slots
            self._growing, self._exhausted = False, True
            raise

    async def _add(self, count: int) -> None:
        try:
            segment = await self._staging.make(count)
        except (OSError, RdmaKvError) as exc:
            self._end(exc)
            return
        try:
            await self._planes.add(self._staging.regions(segment))
        except RdmaKvError as exc:
            self._end(exc)  # another plane may have it: it stays until the end
            return
        self._staging.add(segment)
        await self._links.export_again()
        self._pool.grow(count)
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._growing = False
        if error is not None:
            logger.warning("no more staging memory can be had: %s", error)
            self._exhausted = True
        self._grown()
