"""The effective learning rate: what heavy-ball momentum amounts to after its warm-up."""

from typing import Any

from jaxttp._checks import check_number


def effective_learning_rate(learning_rate: Any, momentum: Any) -> Any:
    """Eta / (1 - m): the rate of plain gradient descent that heavy-ball momentum tends to.

    The accumulator needs about 1/(1 - m) steps to fill; until then the true motion is slower, by a
    delay of m/(1 - m) steps in the long run. `recursion` follows the accumulator exactly; use
    this where there is none (flow, closed form, diffusion).

    Args:
        learning_rate: eta > 0, a number or an array of numbers.
        momentum: m in [0, 1).

    Returns:
        The effective rate, of the same kind.

    Raises:
        ValueError: a rate or a momentum out of range.

    Example:
        >>> round(effective_learning_rate(0.1, 0.9), 6)
        1.0

    Source:
        TTP Section 3.1. The paper also divides the noise by a factor sqrt(1/(1 - m)), which is
        larger than 1 and not needed when the effective rate stands in the noise term as well.
    """
    check_number("learning_rate", learning_rate, at_least=0.0)
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    return learning_rate / (1.0 - momentum)
