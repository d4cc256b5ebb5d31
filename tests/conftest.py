import sys
from pathlib import Path

import lcs  # noqa: F401  before torch: it sets how threads wait

sys.path.insert(0, str(Path(__file__).parent))
