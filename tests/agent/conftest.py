import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import faces


@pytest.fixture(params=["library", "sidecar"])
def face(request, monkeypatch):
    """Runs a test twice: with agents in the engine's process, and with clients of a sidecar."""
    monkeypatch.setattr(faces, "face", request.param)
