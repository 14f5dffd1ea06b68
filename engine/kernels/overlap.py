"""Whether a layer's kernels start while the one before them ends (programmatic dependent launch, Hopper and later).

Such a kernel waits (`gdc_wait`) before it touches what earlier ones wrote; what they cannot have written, weights, it may read
before. It lets the next one start at once (`gdc_launch_dependents`), which waits in its turn for this one's last write.
"""

from __future__ import annotations

OVERLAPPED = True
