"""Running the work of a round: in this process, or in actors on Ray."""

import os

# Huge pages for large tensors, read by torch at its first allocation: a new vector of 11 million parameters costs 8 ms instead
# of 32, which go into zeroing it page by page. A process that has torch already stays as it was.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
