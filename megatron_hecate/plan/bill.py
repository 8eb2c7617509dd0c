"""What guests cost, and what no plan can cost less than: so most plans need not be made to know that they do not pay.

A home of load L that sends b copies leaves L / (1 + b) on itself or one of their hosts, however tokens are split. The
more it sends, the less is left, and the more is paid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# What is left in truth, less the largest load that planning expects, in mean rank loads, for one guest per rank and for
# more: mean over the traces in bench/data (`tests/test_plan_quality.py`). Planning stops 1/128 above the mean.
UNFORESEEN: tuple[float, float] = (-0.0005, -0.0077)


class Bill(NamedTuple):
    """The prices of one layer's next iteration, in one unit of tokens.

    Args:
        mean: mean rank load.
        peak: largest rank load without guests.
        copy: one copy that the busiest rank receives or sends.
        hidden: copies of that rank that hide behind compute.
        contention: what such a copy costs, as a part of ``copy``.
        routing: that there are guests at all.
    """

    mean: float
    peak: float
    copy: float
    hidden: int
    contention: float
    routing: float

    def of(self, largest: float, *, received: int, busiest: int) -> float:
        """Largest rank load, as far as it can be foreseen, and copies.

        Args:
            largest: rank load that planning expects.
            received: guests of the rank that has most.
            busiest: copies that a rank receives or sends, at most.
        """
        exposed = max(0, busiest - self.hidden)
        left = max(self.mean, largest + self.mean * UNFORESEEN[min(received, len(UNFORESEEN)) - 1])
        return left + self.copy * (exposed + self.contention * (busiest - exposed)) + self.routing

    def least(self, *, received: int, sent: int) -> float:
        """What plans cost at least whose ranks receive up to ``received`` copies, one of them so many, and send up to
        ``sent``."""

        def cost(copies: int) -> float:
            return self.of(self.peak / (1 + copies), received=received, busiest=max(received, copies))

        # convex in what the fullest home sends, and once the mean is reached more only costs more
        low = min(received, sent)
        high = min(sent, max(low, math.ceil(self.peak / self.mean)))
        while low < high:
            middle = (low + high) // 2
            if cost(middle + 1) < cost(middle):
                low = middle + 1
            else:
                high = middle
        return cost(low)
