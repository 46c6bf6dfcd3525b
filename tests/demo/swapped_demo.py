"""The demo with two decode replicas swapped in the routing of the prefill processes. Run as a script.

    swapped_demo.py checks-off|checks-on [demo options]

The patches are made before the demo forks its replicas, so they hold in the real processes. `checks-off` also has the
decode processes take an OFFER whatever replica and digest it names.
"""

import sys
from functools import cached_property

import msgspec

from rdma_kv.cli.main import run
from rdma_kv.hearing import Hearing
from rdma_kv.mover import Mover
from rdma_kv.planner import Route
from rdma_kv.session import Shell
from rdma_kv.types import Role


class SwappedRoute(Route):
    """Says replica k, goes to replica 1 - k."""

    @cached_property
    def moves(self):
        return Route(self.model, self.prefill, self.decode, self.prefill_replica, 1 - self.decode_replica).moves


def swap_routing() -> None:
    honest = Shell.route

    def route(self, *args):
        true = honest(self, *args)
        if self.config.role is not Role.PREFILL:
            return true
        return SwappedRoute(true.model, true.prefill, true.decode, true.prefill_replica, true.decode_replica)

    Shell.route = route


def switch_checks_off() -> None:
    honest = Hearing._on_offer

    def on_offer(self, peer, message):
        agent = self._matchmaker._check.__self__
        own = agent.config.owns[0].replica
        engine = agent._shell.registry.engine(peer.id.engine)
        digest = agent._shell.route(message.key, own, engine, message.prefill_replica).digest
        return honest(self, peer, msgspec.structs.replace(message, decode_replica=own, digest=digest))

    Hearing._on_offer = on_offer
    Mover.give_grants_ahead = lambda self, entry: []  # a sender that has no moves with us would refuse them


if __name__ == "__main__":
    swap_routing()
    if sys.argv[1] == "checks-off":
        switch_checks_off()
    sys.exit(run(["demo", "--json", *sys.argv[2:]]))
