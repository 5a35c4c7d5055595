"""Low-rank adapters as a command line says them: ``r=8,alpha=16,modules=q_proj+v_proj``."""

import dataclasses

from jaxttp._core.checks import check_integer, check_number

KEYS = ("r", "alpha", "modules", "rslora")
ALL = "all-linear"
"""Every kernel of the blocks, by PEFT's word."""


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Which adapters.

    Attributes:
        rank: r.
        alpha: α; the rank when None.
        modules: ends of the names that Hugging Face gives the modules, or `ALL`.
        rslora: whether the scale is α/√r, in place of α/r.
    """

    rank: int = 8
    alpha: float | None = None
    modules: tuple[str, ...] | str = ALL
    rslora: bool = False

    def __post_init__(self) -> None:
        check_integer("lora: r", self.rank, at_least=1)
        if self.alpha is not None:
            check_number("lora: alpha", self.alpha, above=0.0)

    @classmethod
    def read(cls, text: str) -> "LoraSettings":
        """Adapters out of words.

        Args:
            text: ``key=value`` with commas between them, of `KEYS`; modules with + between them.

        Raises:
            ValueError: an unknown key, a key twice, or what is no value of it.

        Example:
            >>> LoraSettings.read("r=8,alpha=16,modules=q_proj+v_proj")
            LoraSettings(rank=8, alpha=16.0, modules=('q_proj', 'v_proj'), rslora=False)
        """
        example = "; give such as r=8,alpha=16,modules=q_proj+v_proj."
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (one.strip() for one in part.partition("="))
            if not equals or key not in KEYS:
                raise ValueError(f"lora={text!r}: {part.strip()!r} is none of {', '.join(KEYS)}, "
                                 f"each with = and a value{example}")  # fmt: skip
            if key in given or not value:
                what = "stands twice" if key in given else "has no value"
                raise ValueError(f"lora={text!r}: {key} {what}{example}")
            given[key] = value
        try:
            rank = int(given.get("r", cls.rank))
            alpha = float(given["alpha"]) if "alpha" in given else None
        except ValueError as problem:
            raise ValueError(f"lora={text!r}: {problem}{example}") from problem
        root = given.get("rslora", "no")
        if root not in ("yes", "no"):
            raise ValueError(f"lora={text!r}: rslora must be yes or no{example}")
        modules = given.get("modules", ALL)
        several = modules if modules == ALL else tuple(modules.split("+"))
        return cls(rank, alpha, several, root == "yes")

    def words(self) -> str:
        """In words.

        Example:
            >>> LoraSettings(8, 16.0).words()
            'LoRA r=8, α=16 on all-linear'
        """
        alpha = self.rank if self.alpha is None else self.alpha
        named = self.modules if isinstance(self.modules, str) else ", ".join(self.modules)
        root = ", α/√r" if self.rslora else ""
        return f"LoRA r={self.rank}, α={alpha:g}{root} on {named}"
