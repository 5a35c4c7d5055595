"""The table of a sweep: a row of plain values for every setting."""

from typing import Any

import numpy as np

from jaxttp.forecast.hyperparameters import algorithm_name, schedule_name
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Target


def rows_of(swept: Any) -> list[dict[str, Any]]:
    """One flat dictionary a setting; None where there is no number.

    Args:
        swept: a `jaxttp.forecast.Sweep`.
    """
    out = []
    for i, one in enumerate(swept.settings):
        known = np.isfinite(swept.max_learning_rate[i])
        row: dict[str, Any] = {
            "algorithm": algorithm_name(one.algorithm),
            "learning_rate": float(one.learning_rate),
            "momentum": float(one.momentum),
            "weight_decay": one.decay,
            "batch_size": one.batch_size,
            "schedule": schedule_name(one.schedule),
            "loss": get_loss(one.loss).name,
            "horizon": one.steps,
            "stable": bool(swept.stable[i]),
            "max_learning_rate": float(swept.max_learning_rate[i]) if known else None,
            "final_loss": float(swept.final_loss[i]),
            "final_error": float(swept.final_error[i]),
        }
        for goal in (*swept.thresholds, *swept.targets):
            time = swept.times(goal)[i]
            name = goal.column if isinstance(goal, Target) else f"{goal:g}"
            row[f"steps_{name}"] = int(time) if time >= 0 else None
            row[f"uncertainty_{name}"] = swept.off(i, goal)
            if swept.step_seconds is not None:
                seconds = float(time * swept.step_seconds[i]) if time >= 0 else None
                row[f"seconds_{name}"] = seconds
        row |= {"looked_at": i in swept.trust, "trust": swept.trust.get(i)}
        row |= {"relinearized": i in swept.relinearized, "unsure": i in swept.unsure}
        row |= {"rough": i in swept.rough, "held": i in swept.held}
        row |= {"simulated": i in swept.simulated}
        row |= {"message": swept.message(i)}
        out.append(row)
    return out
