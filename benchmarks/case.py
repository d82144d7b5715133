"""A case: the unit of every benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """A problem of a family: a function, a group of attention's cells, the paper, a model. The label and the inputs derive from
    `sizes` and `options`. Subclasses define the inputs and a `kind`, by which cases are summarised.
    """

    family: str
    sizes: dict[str, int]
    options: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    @property
    def kind(self) -> str:
        return self.family

    @property
    def label(self) -> str:
        parts = [f"{name} {size}" for name, size in self.sizes.items()]
        parts += [name if value is True else f"{name} {value}" for name, value in self.options.items() if value is not False]
        return ", ".join(parts)

    @property
    def title(self) -> str:
        """The text that --match searches."""
        return f"{self.kind}, {self.label}, {str(self.dtype)[6:]}"

    def head(self) -> dict:
        """A case's entry in a record, before measurements."""
        names = {"family": self.family, "kind": self.kind, "case": self.label, "dtype": str(self.dtype)[6:]}
        return names | {"sizes": self.sizes, "options": self.options, "providers": {}, "unavailable": {}}
