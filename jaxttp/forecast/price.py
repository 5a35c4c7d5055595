"""What a forecast costs beside the training that it foresees, counted and not timed.

Counts are the same on every machine, so that what depends on them is. They are floating-point
operations as the traced program has them: products of dense and convolutional layers at their
size, everything else at one a number; a way back through a network at twice a way forward.
"""

import dataclasses

from jaxttp.forecast.descent import Descent
from jaxttp.forecast.problem import Problem
from jaxttp.ntk.estimators import KernelEstimator, plan_of

STEP = 3.0
"""Ways forward that one on and back counts for."""


@dataclasses.dataclass(frozen=True)
class Price:
    """Estimated operations of a training and of the parts of its forecast.

    Attributes:
        training: all steps of it.
        kernel: one kernel.
        whole_pass: one way forward and back with all samples.
        product: one product of the kernel with outputs.

    Example:
        >>> price = Price(training=3e9, kernel=1e8, whole_pass=1e6, product=1e4)
        >>> price.forecast(kernels=2, passes=10, products=100)
        211000000.0
    """

    training: float
    kernel: float
    whole_pass: float
    product: float

    @classmethod
    def of(
        cls,
        problem: Problem,
        descent: Descent,
        estimator: KernelEstimator,
        samples: int | None = None,
    ) -> "Price":
        """From shapes alone.

        Args:
            problem: network and data.
            descent: the training.
            estimator: how kernels come about.
            samples: that are trained on; those of the problem when None.
        """
        n = problem.f0.shape[0]
        step = STEP * plan_of(problem.whole or problem).forward
        return cls(
            training=step * (descent.batch_size or samples or n) * descent.steps,
            kernel=estimator.operations(problem),
            whole_pass=step * n,
            product=estimator.product(problem),
        )

    def forecast(self, kernels: int, passes: float, products: int) -> float:
        """The operations of a forecast.

        Args:
            kernels: that it builds.
            passes: ways on and back with all samples beside them.
            products: with its kernels.
        """
        return kernels * self.kernel + passes * self.whole_pass + products * self.product


def share_of(operations: float, training: float) -> str:
    """How many trainings some operations are, in words.

    Example:
        >>> share_of(1.0, 31.0), share_of(1500.0, 1.0), share_of(1.4, 1.0)
        ('1/31 of', '1,500 times', '1.4 times')
    """
    share = operations / max(training, 1.0)
    if share < 0.95:
        return f"1/{1 / share:.2g} of" if share > 0.1 else f"1/{1 / max(share, 1e-12):.0f} of"
    return f"{share:.2g} times" if share < 10 else f"{share:,.0f} times"
