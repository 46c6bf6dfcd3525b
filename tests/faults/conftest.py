import sys
from pathlib import Path

_HERE = Path(__file__).parent
for folder in (_HERE, _HERE.parent / "agent"):
    sys.path.insert(0, str(folder))
