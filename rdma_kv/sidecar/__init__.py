"""The mover in a process of its own, beside an engine, and what both processes need to talk over a Unix socket.

Theory of operation. The sidecar runs one ordinary `Agent` per attached client. Only the kernels are elsewhere: the
agent's packer computes addresses (`Packer.register_at`), and has chunks gathered and scattered by messages to the process
that has the pools. Staging is memory that both map: memfd, or on a GPU memory of the sidecar that the engine opens by its
CUDA IPC handle.

    engine's process                     Unix socket                     sidecar's process
    Client, CudaKernels or HostKernels   <- wire.py, channel.py ->       Attachment: Agent, RemoteKernels, RemoteEngine

The engine's end: `engine_client`, `engine_sending`, `link`, `memory` (and `rdma_kv.client` above). The sidecar's:
`attachment`, `running`, `remote`, `server`, `listening`, `settings`, `health`, `interfaces`, `logs`, `process`. Both: `wire`,
`facts`, `channel`. Nothing here imports torch.
"""
