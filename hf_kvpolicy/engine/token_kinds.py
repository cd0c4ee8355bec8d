"""What kind of token lies in a column: ordinary, special, punctuation.

Letters: B batch rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["PUNCTUATION_TOKEN", "SPECIAL_TOKEN", "TokenKinds"]

SPECIAL_TOKEN, PUNCTUATION_TOKEN = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenKinds:
    """Token ids of each kind; a token of both is special."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]

    def of(self, ids_BT: Tensor | None) -> Tensor:
        """Return the kind of each token, uint8 [B, T]; 0 is ordinary.

        Raises:
            ConfigError: the forward was given embeddings, which do not say which tokens they are.
        """
        if ids_BT is None:
            raise ConfigError(
                "The model was called with inputs_embeds, but this policy keeps special tokens and punctuation, which "
                "it knows by their ids. Pass input_ids, or choose a policy that does not ask for tokens."
            )
        kinds = torch.zeros_like(ids_BT, dtype=torch.uint8)
        for kind, ids in ((PUNCTUATION_TOKEN, self.punctuation), (SPECIAL_TOKEN, self.special)):
            if ids:
                kinds = kinds.masked_fill(torch.isin(ids_BT, torch.tensor(ids, device=ids_BT.device)), kind)
        return kinds
