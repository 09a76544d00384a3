"""What the pages of a prompt were worth to it: the attention of its last queries.

The one op behind all scores (`kernels.scores.column_sums`) sums what a prompt's last queries give
to each key, weighted over heads by their gates; `radix.importance` makes of it what the tree keeps.
Most requests are scored for nothing else, in the chunk that ends their prompt, and hold a row of
the score table from that forward to the end of the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_kv.radix.importance import page_density, profile

#: Queries at a prompt's end that are measured, if the chunk that ends it has as many.
QUERIES = 16
#: First tokens, which draw attention by where they stand.
SINKS = 4


def page_worth(
    mass: Any | None, page_size: int, num_pages: int, window: int
) -> NDArray[np.float64]:
    """Importance of each page, in units of the prompt's mean, never rising.

    Args:
        mass: attention that each token of the prompt received, a tensor ``[tokens]``; None: it was
            not measured, and every page is worth the same.
        num_pages: pages that are wanted; those that were not measured are worth 1.
        window: last tokens, which attend to themselves.

    Returns:
        float64 ``[num_pages]``.
    """
    worth = np.ones(num_pages)
    if mass is not None:
        found = profile(
            page_density(mass.double().cpu().numpy(), page_size, sinks=SINKS, window=window)
        )
        worth[: len(found)] = found[:num_pages]
    return worth
