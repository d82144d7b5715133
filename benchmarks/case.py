"""What every benchmark measures: a case."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """One problem of a family: a function, a group of attention's cells, the paper, a model. `sizes` and `options` are what its
    label shows and what its inputs are made from. Subclasses give a `kind`, by which cases are summarised, and the inputs.
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
        """What --match looks at."""
        return f"{self.kind}, {self.label}, {str(self.dtype)[6:]}"

    def head(self) -> dict:
        """The result of a case in a record, before anything is measured."""
        names = {"family": self.family, "kind": self.kind, "case": self.label, "dtype": str(self.dtype)[6:]}
        return names | {"sizes": self.sizes, "options": self.options, "providers": {}, "unavailable": {}}
