"""Generation numbers: what makes a stale reader or a late worker detectable (0x01A, 0x0EB)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import IntegrityError
from ._checks import check_int

__all__ = ["GenerationClock", "Generations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """The four numbers a published state carries.

    `request` changes when the cache serves another request, `cache` when the source rows change, `policy`
    when the manifest changes, `state` when the selected subset changes.
    """

    request: int
    cache: int
    policy: int
    state: int

    def __post_init__(self) -> None:
        for name in ("request", "cache", "policy", "state"):
            check_int(f"generation {name}", getattr(self, name))


class GenerationClock:
    """Issues generation numbers that are never reused: a cancelled candidate has consumed its numbers.

    The clock remembers only the highest numbers issued, not what is published; the published `Generations`
    live in the published state and are passed as `parent`.
    """

    __slots__ = ("_cache", "_policy", "_request", "_state")

    def __init__(self, start: Generations) -> None:
        self._request = start.request
        self._cache = start.cache
        self._policy = start.policy
        self._state = start.state

    @property
    def highest(self) -> Generations:
        """The highest number issued so far, per counter."""
        return Generations(request=self._request, cache=self._cache, policy=self._policy, state=self._state)

    def successor(
        self,
        parent: Generations,
        *,
        cache: bool = True,
        state: bool = True,
        policy: bool = False,
        request: bool = False,
    ) -> Generations:
        """Return the candidate after `parent`; each counter named True gets a number never issued before.

        Raises IntegrityError when `parent` carries a number this clock never issued.
        """
        self._check_issued(parent)
        self._cache += cache
        self._state += state
        self._policy += policy
        self._request += request
        return Generations(
            request=self._request if request else parent.request,
            cache=self._cache if cache else parent.cache,
            policy=self._policy if policy else parent.policy,
            state=self._state if state else parent.state,
        )

    def _check_issued(self, parent: Generations) -> None:
        if (
            parent.cache > self._cache
            or parent.state > self._state
            or parent.policy > self._policy
            or parent.request > self._request
        ):
            raise IntegrityError(
                f"The parent {parent} carries a number this clock never issued; the highest are "
                f"{self.highest}. Use the clock of the cache that published the parent."
            )
