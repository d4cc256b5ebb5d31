"""Local conditional scores: length generalization in conditional diffusion, reproduced end to end."""

import os

# Threads of OpenMP wait asleep instead of spinning: on a machine where anything else runs, spinning threads wait for
# ones that are not scheduled, and sampling takes up to thirty times as long. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tensors of 2 MB and more lie in huge pages where the system has them: a pass over a batch of maps then looks up a few
# page addresses instead of thousands. Read at torch's first allocation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"
