"""What one text leaves for the next on the same model: a cache and the graphs captured over it.

Promise: whoever takes a kept cache finds it as empty as a new one, at the addresses that the graphs
know; what does not fit is given up, never bent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4flow.cache import KVCache

if TYPE_CHECKING:
    from ds4flow.graph import DecodeGraph, Rules


@dataclass
class Kept:
    """The decode graph of the last text; it holds its cache. One text at a time may use them."""

    graph: DecodeGraph | None = None

    def cache(self, make: Callable[[], KVCache], shape: tuple[int, int, int]) -> KVCache:
        """An empty cache of `shape`, as `KVCache.shape` gives it: the kept one, or a new one."""
        if self.graph is not None and self.graph.cache.shape == shape:
            self.graph.cache.clear()
            return self.graph.cache
        self.graph = None  # its memory is free before the new cache takes some
        return make()

    def find(self, cache: KVCache, rules: Rules, *, eager: bool) -> DecodeGraph | None:
        """The kept graph, if it runs over this cache by these rules."""
        graph = self.graph
        if graph is None or graph.cache is not cache:
            return None
        return graph if (graph.rules, graph.eager) == (rules, eager) else None
