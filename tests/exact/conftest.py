"""These tests share `naive`, the long way round; `shard_rank.py` imports it as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
